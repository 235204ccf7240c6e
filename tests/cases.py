"""Numbers, transforms by name, a network to measure, and modules built from one seed."""

import torch
from references import total
from torch.utils import _pytree as pytree

DTYPE = torch.float64


def numbers(*shape, start=0.0):
    """Fixed numbers of some irregularity in [-1, 1]: the same in every place they are made."""
    count = 1
    for size in shape:
        count *= size
    return torch.cos(torch.arange(count, dtype=DTYPE) * 1.7 + start).reshape(shape)


def apply(library, name, f):
    """``f``, a function of one pytree, under a transform of ``library``, again of one pytree.

    A function that returns several numbers has ``grad`` of their sum; products have fixed vectors,
    and come with the output.
    """

    def like(tree, start):
        return pytree.tree_map(lambda leaf: numbers(*leaf.shape, start=start), tree)

    def jvp(x):
        return library.jvp(f, (x,), (like(x, 0.5),))

    def vjp(x):
        output, pullback = library.vjp(f, x)
        return output, pullback(like(output, 0.7))

    if name == "grad":
        return library.grad(lambda x: total(f(x)))
    if name in ("jvp", "vjp"):
        return {"jvp": jvp, "vjp": vjp}[name]
    return getattr(library, name)(f)


def deep_mlp(layers=24, batch=64, width=16):
    """Weights, an input, and the loss of a plain deep network of square layers."""
    weights = [numbers(width, width, start=float(i)) / 2 for i in range(layers)]

    def loss(weights, x):
        for w in weights:
            x = torch.tanh(x @ w)
        return x.square().sum()

    return weights, numbers(batch, width), loss


def seeded(build, *args):
    torch.manual_seed(1)
    return build(*args)


def identity(f, **options):
    """What stands for ``functx.remat`` in the reference."""
    return f
