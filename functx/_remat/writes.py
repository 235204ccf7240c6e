"""State that a region writes in place advances once (rule 2).

The forward writes to the program's memory itself. Before the first write to it, the whole storage
is copied; what the node keeps of the inputs that lie there are views of that copy. A replay writes
to a copy of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functx._remat import departures, levels
from functx._remat.operators import tracing
from functx._remat.region import Inputs


class Writes:
    """The inputs' memory as it was before the region first wrote to it.

    Args:
        inputs: of the region.
        made: the inputs that are made of data inside, whose memory is the region's own.
        title: of the region.
    """

    def __init__(self, inputs: Inputs, made: set[int], title: str) -> None:
        self.inputs, self.made, self.title = inputs, made, title
        self.before: dict[int, Any] = {}  # by storage: its copy

    def about_to_write(self, storage: int, overload: Any) -> None:
        """An operation is about to write to memory that the region did not make."""
        inputs = self.inputs
        for number, standin in enumerate(inputs.standins):
            if storage not in inputs.memory[number]:
                continue
            if number not in self.made and levels.is_tracked(standin):
                raise departures.written(self.title, [standin])
            if storage not in self.before:
                self.before[storage] = _copy_of_memory(levels.base_of(standin))

    def inputs_written(self) -> list[list[int]]:
        """The inputs that lie in written memory, storage by storage."""
        memory = self.inputs.memory
        return [[i for i, m in enumerate(memory) if storage in m] for storage in self.before]

    def put_before(self) -> None:
        """Let the inputs' values be those before the first write."""
        inputs = self.inputs
        for numbers, storage in zip(self.inputs_written(), self.before):
            for i in numbers:
                base = self.value_before(i, storage)
                for k in range(len(inputs.values)):
                    at = inputs.position(i, k)
                    inputs.values[k][at] = levels.rebased(inputs.values[k][at], base)

    def value_before(self, i: int, storage: int) -> Tensor:
        """An input, at the base level, as it was."""
        return _view(levels.base_of(self.inputs.standins[i]), self.before[storage])


def copied(standins: list[Tensor], written: list[list[int]]) -> list[Tensor]:
    """The stand-ins of a replay, with memory of their own where the forward wrote."""
    if not written:
        return standins
    standins = list(standins)
    if tracing():  # each lies in memory of its own (see `traced`)
        for (i,) in written:
            base = levels.base_of(standins[i])
            standins[i] = levels.rebased(standins[i], levels.at_depth(0, base.clone))
        return standins
    for numbers in written:
        memory = _copy_of_memory(levels.base_of(standins[numbers[0]]))
        for i in numbers:
            base = _view(levels.base_of(standins[i]), memory)
            standins[i] = levels.rebased(standins[i], base)
    return standins


def _copy_of_memory(t: Tensor) -> Tensor:
    """A copy of the whole storage of ``t``, flat."""

    def copy() -> Tensor:
        with torch.no_grad():
            size = t.untyped_storage().nbytes() // t.element_size()
            return t.as_strided((size,), (1,), 0).clone()

    return levels.at_depth(0, copy)


def _view(t: Tensor, memory: Tensor) -> Tensor:
    """A tensor laid out as ``t`` in other memory."""

    def view() -> Tensor:
        with torch.no_grad():
            flat = memory if memory.dtype is t.dtype else memory.view(t.dtype)
            return flat.as_strided(t.size(), t.stride(), t.storage_offset())

    return levels.at_depth(0, view)
