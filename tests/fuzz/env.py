"""What random programs find: leaves, modules, a custom Function, hooks."""

from __future__ import annotations

from typing import Any

import torch
from cases import DTYPE, numbers
from torch import nn


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


class Holder:
    """A callable object with attributes."""

    def __init__(self, f: Any, n: int, flag: bool) -> None:
        self.f, self.n, self.flag = f, n, flag

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.f(*tensors, n=self.n, flag=self.flag)


def _double(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 1.5


class Env:
    """What programs find: leaves, modules, a custom Function, hooks."""

    function = staticmethod(Own.apply)
    holder = Holder

    def __init__(self, randomness: str) -> None:
        self.randomness = randomness
        self.leaves: list[torch.Tensor] = []
        self.buffer = numbers(3, start=4.0)
        self.linear = nn.Linear(3, 3, dtype=DTYPE)
        self.mlp = nn.Sequential(
            nn.Linear(3, 4, dtype=DTYPE), nn.Tanh(), nn.Linear(4, 3, dtype=DTYPE)
        )
        self.noisy = nn.Sequential(nn.Linear(3, 3, dtype=DTYPE), nn.Dropout(0.4), nn.Tanh())

    def leaf(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A leaf that wants a gradient."""
        leaf = numbers(*shape, start=1.0 + len(self.leaves)).requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def hook(self, t: torch.Tensor) -> None:
        """A hook that changes the gradient."""
        if t.requires_grad:
            t.register_hook(_double)

    @property
    def parameters(self) -> list[torch.Tensor]:
        nets = nn.ModuleList([self.linear, self.mlp, self.noisy])
        return [*self.leaves, *nets.parameters()]
