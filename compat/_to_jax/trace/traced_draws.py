"""Number the random draws of a trace by the state of their generator.

A trace runs on tensors without data, so random operations do not advance torch's generators. Here
every random operation advances its generator, and gets a number that depends on the state before.
If a state is restored (by the replay of a region, ``torch.manual_seed``, ``set_rng_state``, or
another library's checkpointing), the next draws get the same numbers as before, and in JAX the same
random values. After the trace, all generators are restored.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from functx._core import LoweringError

Mark = tuple[bytes, int]


class TracedDraws:
    """The draws of one trace."""

    def __init__(self) -> None:
        self._numbers: dict[Mark, int] = {}
        self._before: dict[torch.Generator, torch.Tensor] = {}

    def advance(self, generator: torch.Generator | None) -> bytes:
        """Advance a generator (the default one if ``None``); returns a hash of its old state."""
        generator = torch.default_generator if generator is None else generator
        state = generator.get_state()
        self._before.setdefault(generator, state)
        # Read the memory directly, since dispatch modes would see an operation on the tensor.
        values = ctypes.string_at(state.data_ptr(), state.numel())
        digest = hashlib.blake2b(values, digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        return digest

    def number(self, mark: Mark) -> int:
        """The number of a draw. Equal marks have equal numbers."""
        return self._numbers.setdefault(mark, len(self._numbers))

    def states(self) -> dict[torch.Generator, torch.Tensor]:
        """The current states of the generators that were used."""
        return {g: g.get_state() for g in (torch.default_generator, *self._before)}

    @contextmanager
    def rewound(self, states: dict[torch.Generator, torch.Tensor]) -> Iterator[None]:
        """A context that starts from earlier states, and restores the current ones at the end."""
        now = self.states()
        _set(states)
        try:
            yield
        finally:
            _set(now)

    def restore(self) -> None:
        """Restore the state that every generator had before the trace."""
        _set(self._before)
        self._before = {}


def _set(states: dict[torch.Generator, torch.Tensor]) -> None:
    for generator, state in states.items():
        generator.set_state(state)


@contextmanager
def only_torch_draws(name: str) -> Iterator[None]:
    """A context that raises an error if Python's or numpy's random generator is used.

    A trace would turn their numbers into constants.
    """
    before = _foreign_states()
    yield
    after = _foreign_states()
    moved = [library for library in after if after[library] != before[library]]
    if moved:
        raise LoweringError(
            f"{name} draws from {' and '.join(moved)} while it is traced, so the numbers would be"
            " constants of the JAX function. Draw with torch (and a key), or pass them as arguments"
        )


def _foreign_states() -> dict[str, Any]:
    numpy = pickle.dumps(np.random.get_state())
    return {"Python's random module": random.getstate(), "numpy.random": numpy}
