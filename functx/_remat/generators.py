"""Random numbers: a replay draws the same numbers as the forward (rule 1).

A region notes the states of the default generators when it begins, and compares them when it ends.
So it does not matter which code draws from them: an operator, a kernel of an extension, or compiled
code. The state of any other generator is noted before the region first draws from it. A replay
restores all these states before it begins, because regions inside of it note them, too. When it
ends, it restores the states that it has found.

NOTE [one replay at a time]
Replays in several threads take turns, because they set the same generators. A replay inside of
another one belongs to the same turn; it is recognized by the active modes, which autograd copies to
its threads. A thread started by user code during a replay can't be recognized as part of it. If the
replay waits for that thread, the lock would deadlock, so it times out. In return, a replay must
leave each generator in the same state as the forward. If it does not, another thread has drawn in
the meantime, and the replay raises an error.
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
        """Note the default generators of the devices in use, when a region begins."""
        default = torch.default_generator
        self.before: dict[torch.Generator, Tensor] = {default: default.get_state()}
        self.after: dict[torch.Generator, Tensor] = {}
        self.drawn: set[int] = set()  # the addresses of generators from which a call has drawn
        self.python = _python_states() if python else None
        if _MAY_HAVE_CUDA and torch.cuda.is_initialized():
            indices = {t.device.index for t in tensors if t.is_cuda} | {torch.cuda.current_device()}
            for index in sorted(indices):
                self._note(torch.cuda.default_generators[index])

    def note(self, generator: torch.Generator) -> None:
        """Note that a call is about to draw from ``generator``."""
        self.drawn.add(generator._cdata)  # type: ignore[attr-defined]
        self._note(generator)

    def _note(self, generator: torch.Generator) -> None:
        # (By address: a dispatch mode gets another Python object for the same generator.)
        if all(generator._cdata != known._cdata for known in self.before):  # type: ignore[attr-defined]
            self.before[generator] = generator.get_state()

    def note_unseen(self) -> None:
        """Note that an operator of an extension has drawn from one of the default generators."""
        self.drawn |= {g._cdata for g in self.before}  # type: ignore[attr-defined]

    def states(self) -> list[bytes]:
        """The current states of the generators that have been noted."""
        return [_bytes(g.get_state()) for g in self.before]

    def ended(self) -> Draws | None:
        """Drop the generators from which the region has not drawn; ``None`` if none is left.

        A region may restore a generator after it has drawn, as ``torch.random.fork_rng`` does. So
        an equal state alone does not mean that the region has not drawn.
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
    """The states that a replay finds, and restores when it ends."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.python: tuple[Any, Any] | None = None
        self.found: dict[torch.Generator, Tensor] = {}
        self.locked, self.legacy = False, 0

    def begin(self) -> None:
        """Note the current states, and set the states with which the forward began."""
        # See NOTE [one replay at a time].
        modes = map(_torch.dispatch_mode_at, range(_torch.dispatch_depth()))
        within_another = any(getattr(mode, "draws_again", False) for mode in modes)
        if not within_another:
            # Release the lock if this thread still holds it, because of an interrupt.
            with suppress(RuntimeError):
                while True:
                    _lock.release()
            self.locked = _lock.acquire(timeout=_PATIENCE)
        # The older vmap of ``is_grads_batched`` refuses draws. Leave it: the replay has no batch.
        self.legacy = _torch.leave_legacy_vmap()
        self.found = {g: g.get_state() for g in self.draws.before}
        self.python = None if self.draws.python is None else _python_states()
        self.rewind()

    def rewind(self) -> None:
        """Set the states with which the forward began."""
        for g, state in self.draws.before.items():
            g.set_state(state)
        _set_python_states(self.draws.python)

    def differ(self) -> torch.Generator | None:
        """A generator whose state is neither that after the forward nor that before it.

        (A generator that is made inside is another one in the replay, so this one has not changed.)
        """
        for g, after in self.draws.after.items():
            if _bytes(g.get_state()) not in (_bytes(self.draws.before[g]), _bytes(after)):
                return g
        return None

    def put_back(self) -> None:
        """Restore the states that the replay has found."""
        _torch.enter_legacy_vmap(self.legacy)
        self.legacy = 0
        for g, state in self.found.items():
            g.set_state(state)
        _set_python_states(self.python)
        if self.locked:
            self.locked = False
            _lock.release()


def _bytes(state: Tensor) -> bytes:
    """The bytes of a state, read without an operation that modes would see."""
    return string_at(state.data_ptr(), state.numel())


def _python_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_python_states(states: tuple[Any, Any] | None) -> None:
    if states is not None:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])
