"""Custom Functions of random programs, in both styles; no backward is the forward's own."""

from __future__ import annotations

from typing import Any

import torch


class Own(torch.autograd.Function):
    """Its backward and jvp agree with each other, and with nothing else."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.sin() * b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return cotangent * (a * b).cos(), cotangent * (a - b).sin()

    @staticmethod
    def jvp(ctx: Any, da: torch.Tensor, db: torch.Tensor) -> torch.Tensor:
        a, b = ctx.saved_tensors
        return da * (a * b).cos() + db * (a - b).sin()


class Pair(torch.autograd.Function):
    """Two results, one of them an integer, and a rule of its own under vmap."""

    @staticmethod
    def forward(a: torch.Tensor) -> Any:
        return a.tanh() * 0.7, a.argsort(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[0])
        ctx.save_for_forward(inputs[0], output[0])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor, _: Any) -> torch.Tensor:
        a, out = ctx.saved_tensors
        return cotangent * a.cos() * out

    @staticmethod
    def jvp(ctx: Any, da: torch.Tensor) -> Any:
        a, out = ctx.saved_tensors
        return da * a.cos() * out, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: torch.Tensor) -> Any:
        return Pair.apply(a.movedim(in_dims[0], 0)), (0, 0)


class OldStyle(torch.autograd.Function):
    """A forward that is given the context; torch knows no transform of it.

    What it reads may be an attribute of the context, which no tape knows.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, factor: float) -> torch.Tensor:
        if factor == 1.0:
            ctx.kept = a
        else:
            ctx.save_for_backward(a)
        ctx.factor = factor
        return a.sin() * factor

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        (a,) = (ctx.kept,) if ctx.factor == 1.0 else ctx.saved_tensors
        return -ctx.factor * cotangent * a.square().cos(), None


@torch.library.custom_op("functx_random_programs::scaled", mutates_args=())
def scaled(a: torch.Tensor, factor: float) -> torch.Tensor:
    """An operator of the user's: its derivatives are in reverse alone, and not its own."""
    return a.sin() * factor


def _keep(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.factor = inputs[1]


def _pull_back(ctx: Any, cotangent: torch.Tensor) -> Any:
    a, out = ctx.saved_tensors
    return cotangent * a.square().cos() * out * ctx.factor, None


def _vmap(info: Any, in_dims: Any, a: torch.Tensor, factor: float) -> Any:
    return scaled(a, factor), in_dims[0]


scaled.register_autograd(_pull_back, setup_context=_keep)
scaled.register_vmap(_vmap)
scaled.register_fake(lambda a, factor: torch.empty_like(a))
