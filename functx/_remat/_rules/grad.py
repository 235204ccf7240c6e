"""grad of a region: the forward is a region one level down, the backward is a region again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_globals
from functx._remat._node import attach
from functx._remat._operator import rule
from functx._remat._region import Flat, Region
from functx._remat._rules.base import Frame


@rule(_torch.TransformType.Grad)
class GradFrame(Frame):
    """A grad level. A slot says whether an input requires grad at this level.

    The body runs inside a throw-away level with a tape of its own, so that it meets the same
    kernels and the same answers to ``requires_grad`` as without remat; the tape is dropped, and a
    node that keeps only the inputs takes its place.
    """

    def __init__(self, interpreter: Any, fn: Flat, region: Region) -> None:
        super().__init__(interpreter.level(), fn, region)
        self.grad_mode = torch.is_grad_enabled()
        self.out_requires: list[bool] = []

    def lower(self, t: Tensor) -> list[Tensor]:
        """The value inside the wrapper; whether the wrapper requires grad is the slot."""
        t = _torch.unwrap_if_dead(t)
        value = _torch.unwrap_for_grad(t, self.level)
        self.slots.append(value is not t and t.requires_grad)
        return [value]

    def transparent(self) -> bool:
        """It only records."""
        return True

    def differentiates(self) -> bool:
        """Whether an input requires grad here."""
        return any(self.slots)

    def lift(self, values: Sequence[Tensor], slot: Any, level: int) -> Tensor:
        """A leaf of the throw-away tape."""
        wrapper = _torch.wrap_for_grad(values[0], level)
        if slot:
            _torch.require_grad(wrapper)
        if self.region.first_run is not None:
            self.leaves.append(id(wrapper))
            if slot:
                self.region.first_run.leaves[id(wrapper)] = wrapper
        return wrapper

    def cut(self, t: Tensor) -> Tensor:
        """A wrapper without history."""
        return _torch.wrap_for_grad(_torch.unwrap_for_grad(t, self.level), self.level)

    def __call__(self, *values: Tensor) -> list[Tensor | None]:
        """The function on a throw-away tape."""
        self.inside = level = _torch.enter_grad_level()
        try:
            with _torch_globals.grad_mode(self.grad_mode):
                outs = self.fn(*self.lift_all(values, self.slots, level))
            self.out_requires = [o is not None and o.requires_grad for o in outs]
            outs = [None if o is None else _torch.unwrap_if_dead(o) for o in outs]
            return [None if o is None else _torch.unwrap_for_grad(o, level) for o in outs]
        finally:
            _torch.exit_grad_level()

    def inside_of(self, t: Tensor) -> Tensor | None:
        """What the wrapper is around."""
        return _torch.get_unwrapped(t) if _torch.is_grad_wrapper(t) else None

    def leave(self, t: Tensor) -> Tensor:
        """Whether it required grad is known still."""
        self.out_requires.append(t.requires_grad)
        return super().leave(t)

    def finish(self, outs: list[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The results on the real tape, behind a node that keeps the inputs."""
        wrapped = [None if o is None else _torch.wrap_for_grad(o, self.level) for o in outs]
        # A tensor of an outer level must not show that level's tape or tangents to this node.
        tensors = [self._own(t) for t in _torch.unwrap_dead((*inputs, *self.captured))]
        return attach(self, tensors, wrapped, self.out_requires)

    def _own(self, t: Tensor) -> Tensor:
        """``t`` as a tensor of this level."""
        outer = _torch.unwrap_for_grad(t, self.level) is t
        return _torch.wrap_for_grad(t, self.level) if outer else t
