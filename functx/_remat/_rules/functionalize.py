"""functionalize of a region is a region of the functionalized function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functx import _torch
from functx._remat._operator import rule
from functx._remat._region import Flat, Region
from functx._remat._rules.base import Frame


@rule(_torch.TransformType.Functionalize)
class FunctionalizeFrame(Frame):
    """A functionalize level. A slot says whether an input was functional at this level."""

    def __init__(self, interpreter: Any, fn: Flat, region: Region) -> None:
        super().__init__(interpreter.level(), fn, region)
        self.reapply_views: bool = interpreter.functionalize_add_back_views()

    def lower(self, t: Tensor) -> list[Tensor]:
        """The value that stands behind a functional tensor, with pending writes applied."""
        self.slots.append(True)
        return [self._unwrap(t)]

    def _unwrap(self, t: Tensor) -> Tensor:
        if not _torch.is_functional(t):
            return t
        _torch.sync(t)
        return _torch.unwrap_functional_tensor(t, self.reapply_views)

    def lift(self, values: Sequence[Tensor], slot: Any, level: int) -> Tensor:
        """A functional tensor of the fresh level."""
        return _torch.wrap_functional_tensor(values[0], level)

    def __call__(self, *values: Tensor) -> list[Tensor | None]:
        """The functionalized function; what it wrote to its inputs is written back."""
        self.inside = level = _torch.enter_functionalize_level(self.reapply_views)
        try:
            wrapped = self.lift_all(values, self.slots, level)
            outs = self.fn(*wrapped)
            results = [None if o is None else self._unwrap(o) for o in outs]
            for value, w in zip(values, wrapped):
                _torch.sync(w)
                _torch.propagate_functional_input_mutation(value, w)
            return results
        finally:
            _torch.exit_functionalize_level()

    def finish(self, outs: list[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Functional tensors of this level."""
        return [None if o is None else _torch.wrap_functional_tensor(o, self.level) for o in outs]
