"""What random programs find outside of themselves: a module, a generator, custom Functions."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import functx

SIZE = 3
_NUMBERS = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def numbers(shape: Any, start: int = 0) -> torch.Tensor:
    """Numbers that depend on the shape only."""
    shape = tuple(shape)
    n = 1
    for size in shape:
        n *= size
    repeated = _NUMBERS[start:].repeat(1 + (start + n) // len(_NUMBERS))
    return repeated[:n].clone().view(shape)


class Cube(torch.autograd.Function):
    """x ** 3, with a forward mode and made for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangent


class Scale(torch.autograd.Function):
    """Times a number in the forward, and times another one in the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * (ctx.factor + 1), None

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent * (ctx.factor + 1)


class Product(torch.autograd.Function):
    """A product that keeps what it needs, in the old style: torch.func refuses it."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, cotangent):
        a, b = ctx.saved_tensors
        return cotangent @ b.t(), a.t() @ cotangent


def hooked(t: torch.Tensor) -> torch.Tensor:
    """A new tensor, the gradient of which is halved by a hook."""
    t = t * 1.5
    if t.requires_grad:
        t.register_hook(lambda g: g * 0.5)
    return t


class Net(nn.Module):
    """Parameters, buffers that advance, and a method with a region."""

    def __init__(self, remat: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.conv = nn.Conv1d(SIZE, SIZE, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm1d(SIZE)
        self.dropout = nn.Dropout(0.3)
        for n, p in enumerate(self.parameters()):
            p.data = numbers(p.shape, 10 * n) / 2
        self.register_buffer("scale", numbers((SIZE,), 70))
        self.register_buffer("running", torch.zeros(SIZE))
        self.register_buffer("steps", torch.zeros(()))
        self.constant = numbers((SIZE, SIZE), 80)
        self.remat = remat

    def forward(self, m, method=None):
        if method is not None:
            return getattr(self, method)(m)
        return torch.sin(self.linear(m)) * self.scale

    def inside(self, m):
        return self.remat(lambda t: torch.tanh(self.linear(t)) * self.constant)(m) + self.scale

    def of_self(self, m):
        return self.remat(self)(torch.sin(m))

    def norm(self, m):
        mean = m.mean(0)
        self.running.mul_(0.9).add_(0.1 * mean.detach())
        return (m - mean) * torch.rsqrt(m.var(0) + 0.1)

    def counted(self, m):
        self.steps.add_(1)
        return torch.sin(m) / self.steps.clone()


def functions(library: Any) -> types.SimpleNamespace:
    """What programs call ``fx``: names of functx, the transforms of ``library``."""
    names = ("grad", "vjp", "jvp", "vmap", "jacrev", "jacfwd", "hessian", "grad_and_value")
    found = types.SimpleNamespace(**{name: getattr(library, name) for name in names})
    found.functional_call, found.checkpoint_name = (
        torch.func.functional_call,
        functx.checkpoint_name,
    )
    if library is functx:
        found.value_and_grad = functx.value_and_grad
        found.functional_call = functx.functional_call
    else:
        found.value_and_grad = lambda f, argnums=0, has_aux=False: (
            lambda *args: library.grad_and_value(f, argnums, has_aux)(*args)[::-1]
        )
    return found


def namespace(remat: Any, library: Any) -> dict[str, Any]:
    """A fresh world: the globals of a program."""
    net = Net(remat)
    return {
        "torch": torch,
        "F": F,
        "aten": torch.ops.aten,
        "cp": functx.checkpoint_policies,
        "fx": functions(library),
        "remat": remat,
        "self": net,
        "box": types.SimpleNamespace(t=numbers((SIZE, SIZE), 100), number=0.7),
        "generator": torch.Generator().manual_seed(7),
        "idx": torch.tensor([2, 0, 2]),
        "Cube": Cube,
        "Scale": Scale,
        "Product": Product,
        "hooked": hooked,
    }
