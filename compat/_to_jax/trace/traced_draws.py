"""Which draw of a trace is which: the state of its generator names it.

A trace runs on tensors without data, so nothing advances torch's generators.  Here every random
operation advances the generator that it draws from, and is numbered by the state found there.
Whatever puts a state back (the replay of a ``remat`` region, ``torch.manual_seed``,
``set_rng_state``, another library's checkpointing) then gets the numbers, and in JAX the random
values, that it got before.  After the trace every generator is as it was.
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
        """Step a generator (the default one for None); gives a name of the state it was in."""
        generator = torch.default_generator if generator is None else generator
        state = generator.get_state()
        self._before.setdefault(generator, state)
        # Not through numpy: reading the state must be no operation that a mode could see.
        values = ctypes.string_at(state.data_ptr(), state.numel())
        digest = hashlib.blake2b(values, digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        return digest

    def number(self, mark: Mark) -> int:
        """The number of a draw; the same mark has the same number."""
        return self._numbers.setdefault(mark, len(self._numbers))

    def states(self) -> dict[torch.Generator, torch.Tensor]:
        """What the generators that were drawn from will give next."""
        return {g: g.get_state() for g in (torch.default_generator, *self._before)}

    @contextmanager
    def rewound(self, states: dict[torch.Generator, torch.Tensor]) -> Iterator[None]:
        """What runs here draws from earlier states; afterwards it is as if it had not."""
        now = self.states()
        _set(states)
        try:
            yield
        finally:
            _set(now)

    def restore(self) -> None:
        """Leave every generator as the trace found it."""
        _set(self._before)
        self._before = {}


def _set(states: dict[torch.Generator, torch.Tensor]) -> None:
    for generator, state in states.items():
        generator.set_state(state)


@contextmanager
def only_torch_draws(name: str) -> Iterator[None]:
    """Refuse random numbers that a trace would freeze: those of Python's and numpy's generators."""
    before = _foreign_states()
    yield
    after = _foreign_states()
    moved = [library for library in after if after[library] != before[library]]
    if moved:
        raise LoweringError(
            f"{name} draws from {' and '.join(moved)} while it is traced: the numbers would be"
            " frozen into the JAX function. Draw with torch (and a key), or pass them as arguments"
        )


def _foreign_states() -> dict[str, Any]:
    numpy = pickle.dumps(np.random.get_state())
    return {"Python's random module": random.getstate(), "numpy.random": numpy}
