"""vmap of a region is a region of the vmapped function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functx import _torch
from functx._remat._operator import rule
from functx._remat._region import Flat, Region
from functx._remat._rules.base import Frame


@rule(_torch.TransformType.Vmap)
class VmapFrame(Frame):
    """A batched level. A slot is the batch dimension of an input, ``None`` where it has none.

    The level is entered also when no input is batched: random operations inside must still see
    the batch size and the randomness mode.
    """

    def __init__(self, interpreter: Any, fn: Flat, region: Region) -> None:
        super().__init__(interpreter.level(), fn, region)
        self.batch_size = interpreter.batch_size()
        self.randomness: str = interpreter.randomness()
        self.out_dims: list[int | None] = []

    def kind(self) -> Any:
        """A body may draw a batch of random numbers, and be given none."""
        return *super().kind(), self.batch_size, self.randomness

    def lower(self, t: Tensor) -> list[Tensor]:
        """The physical tensor; its batch dimension is the slot."""
        value, dim = _torch.unwrap_batched(t, self.level)
        self.slots.append(dim)
        return [value]

    def lift(self, values: Sequence[Tensor], slot: Any, level: int) -> Tensor:
        """Batched where it was batched."""
        return values[0] if slot is None else _torch.add_batch_dim(values[0], slot, level)

    def __call__(self, *values: Tensor) -> list[Tensor | None]:
        """The vmapped function; remembers where the batch dimensions of the results are."""
        _torch.load_batching_rules()
        assert self.batch_size is not None
        self.inside = level = _torch.enter_vmap_level(self.batch_size, self.randomness)
        try:
            outs = self.fn(*self.lift_all(values, self.slots, level))
            results: list[Tensor | None] = []
            dims: list[int | None] = []
            for out in outs:
                value, dim = (None, None) if out is None else _torch.unwrap_batched(out, level)
                results.append(value)
                dims.append(dim)
        finally:
            _torch.exit_vmap_level()
        self.out_dims = dims
        return results

    def inside_of(self, t: Tensor) -> Tensor | None:
        """The physical tensor."""
        if not _torch.is_batched(t):
            return t
        return _torch.get_unwrapped(t) if _torch.wrapper_level(t) == self.inside else None

    def leave(self, t: Tensor) -> Tensor:
        """With its batch dimension, if it has one."""
        self.out_dims.append(_torch.batch_dim(t) if _torch.is_batched(t) else None)
        return super().leave(t)

    def finish(self, outs: list[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Batched results."""
        return [
            out if out is None or dim is None else _torch.add_batch_dim(out, dim, self.level)
            for out, dim in zip(outs, self.out_dims, strict=True)
        ]
