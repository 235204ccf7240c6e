"""Random numbers, replayed as they were drawn (rule 1).

The states of the default generators are noted at the entry of a region and compared at its exit.
So it does not matter what draws from them: an operator, a kernel of an extension, compiled code.
The state of any other generator is noted before the first draw that the region makes from it. A
replay puts all of them back before it begins, since regions inside of it note theirs; and
afterwards what it found.

NOTE [one replay at a time]
Replays in several threads take turns, since they set the same generators. One inside of another,
which shows in the modes around it (autograd copies those to its threads), is part of its turn. In a
thread that user code starts in a replay, and waits for, nothing shows. So nobody waits for ever;
and a replay must leave each generator as the forward did: else somebody has drawn in between.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor

from functx import _torch


def generator_of(tensors: list[Tensor], args: Any, kwargs: Any) -> torch.Generator:
    """The generator that a random operation draws from."""
    kwargs = kwargs or {}
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.Generator):
            return a
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


_MAY_HAVE_CUDA = torch.backends.cuda.is_built()
_lock = threading.RLock()
_PATIENCE = 5.0  # seconds


class Draws:
    """The generators that a region draws from: their states before the first draw, and after."""

    __slots__ = ("after", "before", "drawn", "python")

    def __init__(self, tensors: Sequence[Tensor], *, python: bool) -> None:
        """A region begins: note the default generators of the devices in use."""
        default = torch.default_generator
        self.before: dict[torch.Generator, Tensor] = {default: default.get_state()}
        self.after: dict[torch.Generator, Tensor] = {}
        self.drawn: set[int] = set()  # those from which a call was seen to draw, by address
        self.python = _python_states() if python else None
        if _MAY_HAVE_CUDA and torch.cuda.is_initialized():
            indices = {t.device.index for t in tensors if t.is_cuda} | {torch.cuda.current_device()}
            for index in sorted(indices):
                self._note(torch.cuda.default_generators[index])

    def note(self, generator: torch.Generator) -> None:
        """A draw is about to be made."""
        self.drawn.add(generator._cdata)  # type: ignore[attr-defined]
        self._note(generator)

    def _note(self, generator: torch.Generator) -> None:
        # (By address: a dispatch mode is given another Python object of the same generator.)
        if all(generator._cdata != known._cdata for known in self.before):  # type: ignore[attr-defined]
            self.before[generator] = generator.get_state()

    def note_unseen(self) -> None:
        """An operator of an extension has drawn, from one of the default generators."""
        self.drawn |= {g._cdata for g in self.before}  # type: ignore[attr-defined]

    def states(self) -> list[bytes]:
        """The states of the generators that have been noted, as they are now."""
        return [_bytes(g.get_state()) for g in self.before]

    def ended(self) -> Draws | None:
        """The region has run: what is left without the generators from which it has not drawn.

        A region may put a generator back after it has drawn, as ``torch.random.fork_rng`` does. So
        an equal state alone does not mean that nothing was drawn.
        """
        for g, before in [*self.before.items()]:
            after, n = g.get_state(), before.numel()
            is_equal = string_at(after.data_ptr(), n) == string_at(before.data_ptr(), n)
            if is_equal and g._cdata not in self.drawn:  # type: ignore[attr-defined]
                del self.before[g]
            else:
                self.after[g] = after
        return self if self.before or self.python is not None else None


class Restored:
    """The states that a replay found, to be put back after it."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.python: tuple[Any, Any] | None = None
        self.found: dict[torch.Generator, Tensor] = {}
        self.locked, self.legacy = False, 0

    def begin(self) -> None:
        """Note the states, and put those back that the forward began with."""
        # See NOTE [one replay at a time].
        modes = map(_torch.dispatch_mode_at, range(_torch.dispatch_depth()))
        within_another = any(getattr(mode, "draws_again", False) for mode in modes)
        if not within_another:
            with suppress(RuntimeError):  # until this thread does not hold it: an interrupt left it
                while True:
                    _lock.release()
            self.locked = _lock.acquire(timeout=_PATIENCE)
        # The older vmap of ``is_grads_batched`` refuses draws; what is replayed has no batch.
        self.legacy = _torch.leave_legacy_vmap()
        self.found = {g: g.get_state() for g in self.draws.before}
        self.python = None if self.draws.python is None else _python_states()
        self.rewind()

    def rewind(self) -> None:
        """To where the forward began."""
        for g, state in self.draws.before.items():
            g.set_state(state)
        _set_python_states(self.draws.python)

    def differ(self) -> torch.Generator | None:
        """A generator that is neither as the forward left it, nor, if made inside, as before."""
        for g, after in self.draws.after.items():
            if _bytes(g.get_state()) not in (_bytes(self.draws.before[g]), _bytes(after)):
                return g
        return None

    def put_back(self) -> None:
        """As the replay found them."""
        _torch.enter_legacy_vmap(self.legacy)
        self.legacy = 0
        for g, state in self.found.items():
            g.set_state(state)
        _set_python_states(self.python)
        if self.locked:
            self.locked = False
            _lock.release()


def _bytes(state: Tensor) -> bytes:
    """What is in a state, without an operation that modes would see."""
    return string_at(state.data_ptr(), state.numel())


def _python_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_python_states(states: tuple[Any, Any] | None) -> None:
    if states is not None:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])
