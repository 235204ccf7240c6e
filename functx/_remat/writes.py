"""State that a region writes in place advances once (rule 2).

The forward writes to the memory of user code. Before the first write, the whole storage is copied.
For inputs in that storage, the node saves views of the copy. A replay writes to another copy.

torch refuses a write that autograd records to an input that is differentiated, because the stand-in
is a leaf. So autograd does not record the writes to such an input. An example is a weight that is
masked under ``no_grad()``. The copies are on the tape of the input in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._remat import departures, levels
from functx._remat.region import Inputs


class Writes:
    """The inputs' memory as it was before the region first wrote to it."""

    def __init__(self, inputs: Inputs, made: set[int], title: Any) -> None:
        self.inputs, self.title = inputs, title
        self.made = made  # inputs that are made of data inside: their memory is the region's own
        self.before: dict[int, Any] = {}  # by storage: its copy

    def about_to_write(self, storage: int) -> None:
        """Copy memory that the region did not make, before an operation writes to it."""
        inputs = self._lying_in(storage)
        for i in inputs:
            standin = self.inputs.standins[i]
            if i not in self.made and _torch.tracing() and levels.is_tracked(standin):
                raise departures.written(self.title, [standin])  # copies there have no tape
        if inputs and storage not in self.before:
            self.before[storage] = self.copy(inputs)

    def copy(self, inputs: list[int]) -> Any:
        """A copy of the memory that these inputs share."""
        base = levels.base_of(self.inputs.standins[inputs[0]])
        return levels.at_depth(0, partial(_copy_of_memory, base))

    def _lying_in(self, storage: int) -> list[int]:
        return [i for i, memory in enumerate(self.inputs.memory()) if storage in memory]

    def inputs_written(self) -> list[list[int]]:
        """The inputs that lie in written memory, storage by storage."""
        return [*map(self._lying_in, self.before)]

    def put_before(self) -> None:
        """Set the saved values of inputs to those before the first write."""
        for storage in self.before:
            for i in self._lying_in(storage):
                if self.inputs.has_tangent(i):  # there is a copy of the primal only
                    raise departures.written(self.title, [self.inputs.standins[i]])
                base = self.value_before(i, storage)
                # (A tensor that was made inside, of data, may be on the region's own tape by now.)
                copy = levels.rebased if i in self.made else _copied_to
                for k, values in enumerate(self.inputs.values):
                    at = self.inputs.position(i, k)
                    values[at] = copy(values[at], base)

    def value_before(self, i: int, storage: int) -> Tensor:
        """The value of an input before the first write, at the base level."""
        base = levels.base_of(self.inputs.standins[i])
        return levels.at_depth(0, partial(_view, base, self.before[storage]))


def check_written(standins: list[Tensor], constants: list[int], made: set[int], title: Any) -> None:
    """Raise an error if a write has put a value with history into a constant (rule 4)."""
    for number in constants:
        standin = standins[number]
        if number in made or not levels.is_tracked(standin):
            continue
        if not standin._is_view():
            standin.detach_()
        raise departures.refused(
            f"{title} writes a value that requires grad into a tensor of shape "
            f"{tuple(standin.shape)} that the region did not make. The gradient of the value would "
            "be lost. Write value.detach(), or return the value."
        )


def copied(standins: list[Tensor], written: Sequence[list[int]]) -> list[Tensor]:
    """The stand-ins of a replay, with copies of the memory that the forward wrote to."""
    standins = list(standins)
    for numbers in written:
        bases = [levels.base_of(standins[i]) for i in numbers]
        if _torch.tracing():  # in a trace, inputs do not share memory (see `traced`)
            copies = [levels.at_depth(0, bases[0].clone)]
        else:
            memory = levels.at_depth(0, partial(_copy_of_memory, bases[0]))
            copies = [levels.at_depth(0, partial(_view, base, memory)) for base in bases]
        for i, copy in zip(numbers, copies):
            standins[i] = _copied_to(standins[i], copy)
    return standins


class _Copy(_torch.SingleLevelFunction):
    """The identity, whose result lies in other memory: a copy, in a list, that is made already."""

    @staticmethod
    def forward(ctx: Any, copy: list[Tensor], t: Tensor) -> Tensor:
        return copy[0]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Tensor]:
        return None, cotangent


def _copied_to(t: Tensor, base: Tensor) -> Tensor:
    """``t`` with another plain tensor inside of its wrappers, on the tapes that ``t`` is on."""
    level = _torch.level_of(t)
    if _torch.is_batched(t):
        value, dim = _torch.unwrap_batch(t, level)
        return _torch.wrap_batch(_copied_to(value, base), dim, level)
    copy = base
    if level > 0:
        copy = _torch.wrap_grad(_copied_to(_torch.unwrap_grad(t, level), base), level)
    return _torch.apply_at_level(_Copy.apply, [copy], t) if t.requires_grad else copy


@torch.no_grad()
def _copy_of_memory(t: Tensor) -> Tensor:
    """A copy of the whole storage of ``t``, flat."""
    size = t.untyped_storage().nbytes() // t.element_size()
    return t.as_strided((size,), (1,), 0).clone()


@torch.no_grad()
def _view(t: Tensor, memory: Tensor) -> Tensor:
    """A tensor laid out as ``t`` in other memory."""
    flat = memory if memory.dtype is t.dtype else memory.view(t.dtype)
    return flat.as_strided(t.size(), t.stride(), t.storage_offset()).detach()
