"""A replay that leaves nothing out, where one that does can't be matched with its forward.

What a replay leaves out is found by the place of an operation in the forward, and those are ATen
operations: which ones run depends on more than the body. Autograd copies what is written to in
place, once for each tape that needs it, and a pullback may be on more tapes than the forward was;
it makes zeros, and compares sizes, by what requires grad; kernels differ with caches. Such a replay
begins again, and runs everything, as it does where nothing can be left out. The operations of the
body are compared with the forward all the same.

NOTE [absent inputs]
Inputs that no pullback read in the forward were not kept. What is computed from them does not run
here: memory nobody wrote to stands in for it. The ledger says, as it did in the forward, whether
the tapes have come to hold any of it; if they have, this replay reads what the forward did not, and
it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_fake, _torch_operators
from functx._errors import ReplayError
from functx._remat._holders import Holders
from functx._remat._ledger import Ledger
from functx._remat._letting_go import Passing
from functx._remat._prune import Departed, Pruned
from functx._remat._saving import StoodIn, standing_in
from functx._remat._step import Layout, empty, kind_of, layout_of
from functx._remat._tapes import leaves_below, nodes_of, tensors_of
from functx._remat._tracker import SILENT, tracking
from functx._remat._watch import watchers, watching

_DROPOUT = torch.ops.aten.native_dropout.default


class Whole(Ledger):
    """Runs what does not read an absent input, and knows what that is. ``NOTE [absent inputs]``.

    Args:
        tensors: the inputs of the body.
        needed: which of them are there.
        constants: what stands for those that are not.
    """

    def __init__(
        self, tensors: Sequence[Tensor], needed: Sequence[bool], constants: Sequence[Tensor] = ()
    ) -> None:
        super().__init__(())
        absent = [t for t, there in zip(tensors, needed, strict=True) if not there]
        self._absent = [*map(Holders, (*absent, *constants))]
        self._missing = {h.storage for h in self._absent}
        self._unknown: set[int] = set()  # steps that did not run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, if what it reads is there."""
        kind = kind_of(func)
        of_shapes = kind.view or kind.unwritten or kind.draws_blindly
        if self.paused or of_shapes or not self._reads_what_is_missing(args, kwargs or {}):
            if func is _DROPOUT and self._reads_what_is_missing(args, kwargs or {}):
                self._unknown.add(len(self.steps))  # it draws by shape alone, and multiplies
            return super().__torch_dispatch__(func, types, args, kwargs)
        args, kwargs = _torch_operators.callable_arguments(func, args, kwargs or {})
        if kind.writes and not kind.statistics:
            if kind.draws or not (kind.in_place and args) or self._comes_from_outside(args[0]):
                raise self._departed(func)
            out = args[0]
        else:
            if kind.draws or not kind.skippable:
                raise self._departed(func)
            out = self._unwritten(func, args, kwargs)
        self._unknown.add(len(self.steps))
        self._note(kind, args, kwargs, out)
        standing_in(StoodIn.UNWRITTEN)
        for watcher in watchers():
            watcher.skipped(func, args, kwargs, out)
        return out

    def skipped(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """NOTE [what inner regions leave out] in `_watch`."""
        if self._reads_what_is_missing(args, kwargs or {}):
            self._unknown.add(len(self.steps))
        super().skipped(func, args, kwargs, out)

    def check(self, results: Sequence[Tensor | None]) -> None:
        """The body has run: no tape may hold anything that is missing.

        Raises:
            Departed: one does, or nobody knows.
        """
        leaves = {id(leaf) for leaf in leaves_below(*nodes_of(results))}
        if not self.settle(results) or any(
            h.storage is None or self.needs(h) or h.grown(leaves) for h in self._absent
        ):
            raise Departed("its tape holds what comes from inputs that the forward's did not", self)

    def _departed(self, func: Any) -> Departed:
        return Departed(f"it runs {func} on inputs that were not kept", self)

    def _reads_what_is_missing(self, args: Any, kwargs: Any) -> bool:
        for t in tensors_of(args, kwargs):
            try:
                storage = _torch.storage_key(t)
            except (RuntimeError, NotImplementedError):
                continue  # the ledger gives up on it
            writer = self._writers.get(storage)
            if storage in self._missing if writer is None else writer >> 6 in self._unknown:
                return True
        return False

    def _comes_from_outside(self, t: Tensor) -> bool:
        storage = _torch.storage_key(t)
        return storage not in self._writers or storage in self._external

    def _unwritten(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Memory nobody wrote to, as the operation would give."""
        try:
            layouts, single = _layouts(func, args, kwargs)
        except Exception as error:
            raise self._departed(func) from error
        with watching(False), tracking(SILENT), _torch.cleared_interpreter_stack():
            outs = [None if layout is None else empty(layout) for layout in layouts]
        return outs[0] if single else outs


def replayed(
    again: Callable[..., list[Tensor | None]],
    tensors: Sequence[Tensor],
    pruned: Pruned,
    passing: Passing | None,
    needed: Sequence[bool],
    constants: Sequence[Any],
    name: str,
) -> list[Tensor | None]:
    """A replay that leaves something out, or else one that does not.

    Args:
        again: runs the body, under a mode.
        tensors: its inputs.
        pruned: leaves something out.
        passing: inputs that go with their last use.
        needed: which inputs were kept.
        constants: of the region.
        name: of the region.

    Raises:
        ReplayError: what was kept is not enough.
    """
    try:
        return again(tensors, pruned, passing)
    except Departed as departure:
        if departure.replay is not pruned:
            raise  # of a region around this one
        how = str(departure)
        if passing is not None and passing.gone:
            raise _error(name, how) from None
    # By now nothing holds what the first try made.
    absent = [c.for_replay(name) for c in constants if c.is_absent()]
    whole = None if all(needed) and not absent else Whole(tensors, needed, absent)
    try:
        return again(tensors, whole)
    except Departed as again_departed:
        if again_departed.replay is not whole:
            raise
    finally:
        if whole is not None:
            whole.let_go()  # else what it counts as the engine's is missed later, by address
    raise _error(name, how)


def _error(name: str, how: str) -> ReplayError:
    return ReplayError(
        f"remat: the replay of the region {name!r} departed from its forward: {how}. A region must "
        "do the same each time it runs."
    )


def _layouts(func: Any, args: Any, kwargs: Any) -> tuple[list[Layout | None], bool]:
    """Those of the results of an operation; whether it gives one."""
    with (
        tracking(SILENT),
        _torch.cleared_interpreter_stack(),
        _torch.without_modes(),
        torch.no_grad(),
        _torch_fake.FakeTensorMode(),
    ):
        out = func(*_like(list(args)), **_like(kwargs))
    single = isinstance(out, Tensor)
    parts = [out] if single else list(out)
    return [None if t is None else layout_of(t) for t in parts], single


def _like(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        shape, stride, dtype, device = layout_of(tree)
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if isinstance(tree, dict):
        return {key: _like(x) for key, x in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_like(x) for x in tree])
    return tree
