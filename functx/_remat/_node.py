"""The autograd node of a region: keeps the inputs, and pulls back by running the region again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._errors import ReplayError
from functx._remat._operator import call
from functx._remat._pullback import Pullback
from functx._remat._region import Flat, Options, Region, notify


class _Payload:
    """What a node needs beside tensors."""

    __slots__ = ("fn", "level", "outs", "region")

    def __init__(self, region: Region, fn: Flat, outs: Sequence[Tensor], level: int) -> None:
        self.level = level
        self.region = region
        self.fn = fn
        self.outs: Sequence[Tensor] | None = outs


class RegionNode(_torch.SingleLevelFunction):  # type: ignore[misc,name-defined]
    """One node at one level; the results exist already."""

    @staticmethod
    def forward(ctx: Any, payload: _Payload, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Put the results behind the node."""
        outs = payload.outs
        assert outs is not None
        payload.outs = None
        ctx.payload = payload
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The pullback, as a region of its own, at whatever level the engine runs."""
        payload = ctx.payload
        region: Region = payload.region
        needs = ctx.needs_input_grad[1:]
        wanted = [i for i, c in enumerate(cotangents) if c is not None]
        if not wanted or not any(needs):
            return (None, *(None for _ in needs))
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise ReplayError(
                f"remat: an input of the region {region.options.name!r} was modified in place "
                f"between its forward and its replay ({error}). Modify it after the backward, or "
                "give the region a clone."
            ) from error
        pullback = Pullback(payload.fn, needs, wanted, payload.level)
        tensors = [*saved, *(c for c in cotangents if c is not None)]
        tensors = [_torch.unwrap_if_dead(t) for t in tensors]
        if not torch.is_grad_enabled() and _torch.peek_interpreter_stack() is None:
            grads = pullback(*tensors)
        else:
            options = Options(
                name=f"pullback of {region.options.name}",
                determinism_check=region.options.determinism_check,
                replay=True,
            )
            grads = call(Region(pullback, tensors, options), made_here=True)
        results = iter(grads)
        return (None, *(next(results) if need else None for need in needs))


def attach(
    region: Region,
    fn: Flat,
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor | None],
    requires: Sequence[bool],
    *,
    level: int,
) -> list[Tensor | None]:
    """Put those results that require grad behind a node that keeps ``tensors``.

    Args:
        region: what is replayed.
        fn: the region's function as the level of the node sees it, of ``tensors``.
        tensors: explicit inputs, then captures.
        outs: the results, not on the tape yet.
        requires: which of them require grad.
        level: of the node; 0 is plain autograd, below all transforms.
    """
    differentiable = [o for o, r in zip(outs, requires) if r and o is not None]
    if not differentiable:
        return list(outs)
    allowed = _torch.get_single_level_function_allowed()
    _torch.set_single_level_function_allowed(True)
    try:
        payload = _Payload(region, _selected(fn, requires), differentiable, level)
        # Past the `apply` that regions observe: this node is the engine's own.
        results = super(_torch.SingleLevelFunction, RegionNode).apply(payload, *tensors)
    finally:
        _torch.set_single_level_function_allowed(allowed)
    notify(tensors, region.options.name)
    taped = iter(results)
    return [next(taped) if r else o for o, r in zip(outs, requires)]


def _selected(fn: Flat, requires: Sequence[bool]) -> Flat:
    """``fn``, giving only the results that require grad."""
    if all(requires):
        return fn
    keep = tuple(requires)

    def selected(*tensors: Tensor) -> list[Tensor | None]:
        return [o for o, r in zip(fn(*tensors), keep) if r]

    return selected
