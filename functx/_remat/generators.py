"""Random numbers, replayed as they were drawn (rule 1).

A generator's state is noted before the first draw that a region makes from it. A replay puts all of
them back before it begins, since regions inside of it note theirs, and afterwards restores what it
found. A replay must leave each generator as the forward did: if it does not, somebody else has
drawn in between, in another thread say, and the numbers were not the same.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor


def generator_of(tensors: list[Tensor], args: Any, kwargs: Any) -> torch.Generator:
    """The generator that a random operation draws from."""
    for a in (*args, *(kwargs or {}).values()):
        if isinstance(a, torch.Generator):
            return a
    device = (kwargs or {}).get("device")
    device = tensors[0].device if tensors else torch.device(device or "cpu")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class Draws:
    """The generators that a region draws from: their states before the first draw, and after."""

    __slots__ = ("after", "before", "python")

    def __init__(self, *, python: bool) -> None:
        self.before: dict[torch.Generator, Tensor] = {}
        self.after: dict[torch.Generator, Tensor] = {}
        self.python = _python_states() if python else None

    def note(self, generator: torch.Generator) -> None:
        """A draw is about to be made."""
        if generator not in self.before:
            self.before[generator] = generator.get_state()

    def end(self) -> None:
        """The region has run."""
        self.after = {g: g.get_state() for g in self.before}

    def begin_again(self) -> Restored:
        """Put the states back, for a replay."""
        return Restored(self)


class Restored:
    """The states that a replay found, to be put back after it."""

    __slots__ = ("draws", "found", "python")

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.found = {g: g.get_state() for g in draws.before}
        self.python = None if draws.python is None else _python_states()
        self.rewind()

    def rewind(self) -> None:
        """To where the forward began."""
        for g, state in self.draws.before.items():
            g.set_state(state)
        _set_python_states(self.draws.python)

    def differ(self) -> torch.Generator | None:
        """A generator that the replay has not left as the forward did."""
        for g, state in self.draws.after.items():
            if not torch.equal(g.get_state(), state):
                return g
        return None

    def put_back(self) -> None:
        """As the replay found them."""
        for g, state in self.found.items():
            g.set_state(state)
        _set_python_states(self.python)


def _python_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_python_states(states: tuple[Any, Any] | None) -> None:
    if states is not None:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])
