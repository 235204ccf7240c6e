"""What random programs find outside of themselves: a module, a generator, custom Functions."""

import math
import types

import torch
from torch import nn
from torch.nn import functional as F

import functx

SIZE = 3


def numbers(shape, start=0):
    """Numbers between -1.5 and 1.5 that depend on the shape only."""
    angles = torch.arange(start, start + math.prod(shape), dtype=torch.float64)
    return 1.5 * torch.cos(1.7 * angles).reshape(tuple(shape))


class Cube(torch.autograd.Function):
    """x ** 3, the derivative of which is k times too large; made for vmap and forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, k):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx, cotangent):
        return 3 * ctx.k * ctx.saved_tensors[0] ** 2 * cotangent, None

    @staticmethod
    def jvp(ctx, tangent, _):
        return 3 * ctx.k * ctx.saved_tensors[0] ** 2 * tangent


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


def hooked(t):
    """A new tensor, the gradient of which is halved by a hook."""
    t = t * 1.5
    if t.requires_grad:  # (where a region's result does not depend on it, its gradient is None)
        t.register_hook(lambda g: None if g is None else g * 0.5)
    return t


class Net(nn.Module):
    """Parameters, buffers that advance, and a method with a region."""

    def __init__(self, remat):
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


def change(world, first):
    """Let what programs look at in ``now`` be that of the first run, or something else."""
    net, now = world["self"], world["now"]
    now.first = first
    now.number, now.times, now.dim, now.rate = (0.7, 2, 0, 0.4) if first else (1.3, 3, 1, 0.6)
    now.dtype = torch.float64 if first else torch.int64
    now.sizes = [1, 2] if first else [1, 1, 1]
    now.view, now.expand = ((9, 1), (3, 3)) if first else ((3, 3), (3, 1))
    now.tensor = net.constant if first else net.linear.weight
    now.vector = net.linear.bias if first else net.scale
    now.generator = world["generator"] if first else None
    net.dropout.train(first)


def kept(remat):
    """``remat`` that gives one region for one function, where it closes over nothing."""
    regions = {}

    def region(f, **options):
        if getattr(f, "__closure__", None) is not None or not hasattr(f, "__code__"):
            return remat(f, **options)
        name = f.__code__, str(options)
        if name not in regions:
            regions[name] = remat(f, **options)
        return regions[name]

    return region


def namespace(remat):
    """A fresh world: the globals of a program."""
    remat = kept(remat)
    return {
        "torch": torch,
        "F": F,
        "aten": torch.ops.aten,
        "cp": functx.checkpoint_policies,
        "fx": functx,
        "remat": remat,
        "self": Net(remat),
        "box": types.SimpleNamespace(t=numbers((SIZE, SIZE), 100), number=0.7),
        "generator": torch.Generator().manual_seed(7),
        "now": types.SimpleNamespace(),
        "idx": torch.tensor([2, 0, 2]),
        **{f.__name__: f for f in (Cube, Product, hooked)},
    }
