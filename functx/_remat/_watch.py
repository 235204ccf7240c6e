"""Whether what runs is a body, which the dispatch modes of regions watch, or the engine itself.

The engine's own operations (a detach here and there) depend on what requires grad, which is not the
same in a forward and in its replays. So no record has them: not that of the region, and not that of
a region around it.

NOTE [what inner regions leave out]
A replay leaves out what its pullback does not read, and that depends on what tapes are there. So
what a region inside another one leaves out may differ from run to run of the outer one; the outer
one is told of it as if it had run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from functx import _torch, _torch_compiler, _torch_modes
from functx._remat._tapes import tensors_of


class Watcher(_torch.TorchDispatchMode):
    """A dispatch mode of a region.

    Attributes:
        holds_regions: whether a region ran inside.
        paused: whether what runs is the engine's own.
        python_on_tape: whether Python code (a custom Function, a hook) is on the tape.
        reliable: whether the record is complete; if not, nothing may be left out of a replay.
    """

    only_observes = True
    supports_higher_order_operators = True
    holds_regions = False
    paused = False
    python_on_tape = False
    reliable = True
    _should_skip_dynamo = _torch.never_skip_dynamo

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # A compiled function that a body calls would have the handler compiled, and nothing else.
        _torch_compiler.uncompiled(cls.__torch_dispatch__)

    def __init__(self) -> None:
        if not _torch_modes.LEAN:
            super().__init__()
        self._flags: list[_torch_modes.Flags] = []

    def __enter__(self) -> Any:
        if not _torch_modes.LEAN:
            return super().__enter__()
        self._flags.append(_torch_modes.enter_dispatch_mode(self))
        return self

    def __exit__(self, *exc: Any) -> None:
        if not _torch_modes.LEAN:
            super().__exit__(*exc)
        else:
            _torch_modes.leave_dispatch_mode(self._flags.pop())

    def opaque(self, func: Any) -> None:
        """An operator is to run that runs functions: what they do, nobody sees."""
        self.reliable = False

    def skipped(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A region inside this one left an operation out, and took ``out`` for its result."""
        raise NotImplementedError

    def copied_unseen(self, source: Tensor, copy: Tensor) -> None:
        """The engine, which nobody watches, copied memory for a region inside this one."""

    def held_unseen(self, t: Tensor) -> None:
        """The node of a region inside this one reads a tensor that it does not hold on its tape."""

    def ran_unrecorded(self, args: Any, kwargs: Any, out: Any) -> None:
        """An operation ran that is not on the record, which is incomplete: it gave some memory."""

    def take_view(self, t: Any) -> None:
        """Another tensor comes to have the memory of ``t``."""

    def exported(self, t: Tensor) -> None:
        """The memory of a plain tensor, or what is in it, is handed to what is no operation."""


class unwatched:
    """Run the enclosed code, that of a region without a mode of its own.

    Args:
        departs: called when a mode would have been told something. ``NOTE [known runs]``.
    """

    __slots__ = ("_before", "_departs")

    def __init__(self, departs: Callable[[], None]) -> None:
        self._departs = departs

    def __enter__(self) -> None:
        self._before, _unwatched.departs = _unwatched.departs, self._departs

    def __exit__(self, *exc: Any) -> None:
        _unwatched.departs = self._before


class _Unwatched(threading.local):
    departs: Callable[[], None] | None = None


_unwatched = _Unwatched()


def around() -> Iterator[Watcher]:
    """The modes of the regions around this point."""
    if (departs := _unwatched.departs) is not None:
        departs()
    for i in range(_torch.dispatch_mode_depth()):
        mode = _torch.get_dispatch_mode_at(i)
        if isinstance(mode, Watcher):
            yield mode


def watchers() -> Iterator[Watcher]:
    """Those of them that watch."""
    return (mode for mode in around() if not mode.paused)


def tell_of_a_region() -> None:
    """The regions that are running hold another one."""
    for mode in around():
        mode.holds_regions = True


def tell_of_a_copy(source: Tensor, copy: Tensor) -> None:
    """The engine copied memory: for all regions around, the copy is what the source is."""
    for mode in around():
        mode.copied_unseen(source, copy)


def tell_of_a_constant(t: Tensor) -> None:
    """The node of a region reads it: for all regions around, it is no tape that holds it."""
    for mode in around():
        mode.held_unseen(t)


def tell_of_an_export(t: Tensor) -> None:
    """Memory is handed to what is no operation: for all regions around, all of it is read."""
    while _torch.is_wrapped(t):
        t = _torch.get_unwrapped(t)
    for mode in around():
        mode.exported(t)


def tell_of_indices(parts: Sequence[Any], lists_only: bool) -> None:
    """Of ``t[:, [i, j]]`` and ``t[[i, j, ...]]``: C++ takes these values past everything.

    Args:
        parts: of a tuple or list that an operation is given.
        lists_only: whether they are read only in the lists among them.
    """
    among = tensors_of(*(x for x in parts if isinstance(x, list)) if lists_only else parts)
    for t in among:
        if lists_only or not (t.dim() or t.is_floating_point() or t.is_complex()):
            tell_of_an_export(t)


def tell_of_a_view(t: Tensor) -> None:
    """A tensor is given the memory of ``t``, where no dispatch mode sees it."""
    while _torch.is_wrapped(t):
        t = _torch.get_unwrapped(t)
    for mode in around():
        mode.take_view(t)


def nobody_watches() -> bool:
    """Whether there is no mode to hide the engine's own operations from."""
    return not (_torch.function_mode_depth() or _torch.dispatch_mode_depth())


def python_on_tape() -> None:
    """A body put Python code on its tape; all regions it is in take note."""
    for mode in around():
        mode.python_on_tape = True


def all_must_run() -> None:
    """Somebody compares what every operation gives: regions around it leave nothing out."""
    for mode in around():
        mode.reliable = False


def beside_the_modes(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What an operation gives that computes otherwise where a dispatch mode is active.

    So it does without regions, if the user has one.
    """
    depth = _torch.dispatch_mode_depth()
    if not all(isinstance(_torch.get_dispatch_mode_at(i), Watcher) for i in range(depth)):
        return run(*args, **kwargs)
    all_must_run()
    with _torch.without_modes():
        out = run(*args, **kwargs)
    for mode in around():
        mode.ran_unrecorded(args, kwargs, out)
    return out


class watching:
    """Run the enclosed code watched by all regions it is in (but one, perhaps), or by none."""

    __slots__ = ("_but", "_found", "_on")

    def __init__(self, on: bool, *, but: Watcher | None = None) -> None:
        self._on = on
        self._but = but

    def __enter__(self) -> None:
        self._found: list[tuple[Watcher, bool]] = []
        depth = _torch.dispatch_mode_depth()
        if not depth:
            return
        for i in range(depth):
            mode = _torch.get_dispatch_mode_at(i)
            if isinstance(mode, Watcher):
                self._found.append((mode, mode.paused))
                mode.paused = not self._on or mode is self._but

    def __exit__(self, *exc: Any) -> None:
        for mode, before in self._found:
            mode.paused = before
