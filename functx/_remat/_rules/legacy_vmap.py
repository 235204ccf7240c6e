"""The older vmap of torch, which ``is_grads_batched`` and ``vectorize=True`` run: a level as well.

It is on no stack of transforms, and the tapes of its tensors are those of the values inside. So it
is peeled off at the base, where a region would else take a batched tensor for a plain one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from functx import _torch_vmap
from functx._remat._region import Flat, Region
from functx._remat._rules.base import Frame


class LegacyVmapFrame(Frame):
    """A level of the older vmap. A slot says whether an input is batched, in dimension 0 inside."""

    def __init__(self, fn: Flat, region: Region) -> None:
        super().__init__(0, fn, region)
        self.level_of_call = _torch_vmap.legacy_vmap_level()
        self.out_batched: list[bool] = []

    def lower(self, t: Tensor) -> list[Tensor]:
        """The tensor of all examples."""
        batched = _torch_vmap.is_legacy_batched(t)
        self.slots.append(batched)
        return [_torch_vmap.remove_legacy_batch_dim(t, self.level_of_call, 0, 0) if batched else t]

    def lift(self, values: Sequence[Tensor], slot: bool, level: int) -> Tensor:
        """Batched where it was batched."""
        return _torch_vmap.add_legacy_batch_dim(values[0], 0, level) if slot else values[0]

    def __call__(self, *values: Tensor) -> list[Tensor | None]:
        """The vmapped function; remembers which results are batched."""
        level = _torch_vmap.enter_legacy_vmap()
        try:
            outs = self.fn(*self.lift_all(values, self.slots, level))
            self.out_batched = [o is not None and _torch_vmap.is_legacy_batched(o) for o in outs]
            return [
                _torch_vmap.remove_legacy_batch_dim(o, level, 0, 0) if b and o is not None else o
                for o, b in zip(outs, self.out_batched, strict=True)
            ]
        finally:
            _torch_vmap.exit_legacy_vmap()

    def admit(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Put late inputs together, at the level that was entered last."""
        first = len(self.slots) - len(values)
        return self.lift_all(values, self.slots[first:], _torch_vmap.legacy_vmap_level())

    def finish(self, outs: list[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Batched results."""
        return [
            _torch_vmap.add_legacy_batch_dim(o, 0, self.level_of_call) if b and o is not None else o
            for o, b in zip(outs, self.out_batched, strict=True)
        ]
