"""Cases as data: base functions, the transforms they go through, networks to measure."""

from typing import Any, NamedTuple

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


class Base(NamedTuple):
    """A function to transform.

    Attributes:
        function: Takes one pytree of tensors and ``remat``, which some use inside.
        shapes: A pytree of shapes (as ``torch.Size``), like the argument.
        single: Whether no derivative of any order sums more than two gradients of one value, so
            that equality must be bitwise.
    """

    function: Any
    shapes: Any
    single: bool


_WEIGHT = numbers(3, 3)


def _chain(x, remat):
    return torch.sin(x @ _WEIGHT)


def _mlp(params, remat):
    hidden = numbers(2, start=0.3)
    for layer in params["layers"]:
        hidden = torch.tanh(hidden @ layer["w"] + layer["b"])
    return hidden * params["scale"]


def _closure(x, remat):
    outer = torch.exp(x)  # a tensor of every level around
    return remat(lambda y: torch.sin(y * outer))(x)


def _attention(x, remat):
    q, k, v = x @ numbers(2, 2), x @ numbers(2, 2, start=1.0), x @ numbers(2, 2, start=2.0)
    return torch.softmax(q @ k.mT, dim=-1) @ v


_LAYER = {"w": torch.Size([2, 2]), "b": torch.Size([2])}

BASES = {
    "chain": Base(_chain, torch.Size([3]), True),
    "mlp": Base(_mlp, {"layers": [_LAYER, _LAYER], "scale": torch.Size([])}, False),
    "closure": Base(_closure, torch.Size([3]), False),
    "attention": Base(_attention, torch.Size([2, 2]), False),
}


def argument(base, batch_dims):
    """An argument for ``base`` with ``batch_dims`` leading dimensions of size 2."""
    shapes, spec = pytree.tree_flatten(base.shapes, is_leaf=lambda s: isinstance(s, torch.Size))
    leaves = [numbers(*(2,) * batch_dims, *shape, start=float(i)) for i, shape in enumerate(shapes)]
    return pytree.tree_unflatten(leaves, spec)


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
