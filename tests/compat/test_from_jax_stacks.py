"""Random stacks of transforms, torch.func's and functx's mixed, of a from_jax function."""

import random

import jax.numpy as jnp
import pytest
import torch
from torch.utils._pytree import tree_leaves

import functx
from functx.compat import from_jax

SIZES = torch.linspace(-1, 1, 2, dtype=torch.float64)


def total(tree):
    return sum(leaf.sin().sum() for leaf in tree_leaves(tree))


# Each makes a function of x from a function of x; `t` is torch.func or functx.
LAYERS = {
    "grad": lambda t, f: t.grad(lambda x: total(f(x))),
    "vmap of a factor": lambda t, f: lambda x: t.vmap(lambda a: f(a * x))(SIZES),
    "vmap": lambda t, f: lambda x: t.vmap(f)(torch.stack([x, 2 * x])),
    "jvp": lambda t, f: lambda x: t.jvp(f, (x,), (x.cos(),))[1],
    "jacrev": lambda t, f: t.jacrev(lambda x: total(f(x)) * x),
    "jacfwd": lambda t, f: t.jacfwd(lambda x: total(f(x)) * x),
    "vjp": lambda t, f: lambda x: t.vjp(lambda x: total(f(x)), x)[1](x.sum())[0],
    "remat": lambda t, f: functx.remat(f),
}

OURS = from_jax(lambda w, x: jnp.tanh(w * x) + jnp.sin(x) * w, enable_x64=True)


def twin(w, x):
    return torch.tanh(w * x) + torch.sin(x) * w


def results(f, stack, outside):
    """The value of a stack, and gradients of plain autograd around it."""
    w = torch.linspace(0.3, 1.1, 3, dtype=torch.float64).requires_grad_()
    x = torch.linspace(0.1, 0.7, 3, dtype=torch.float64).requires_grad_()
    composed = lambda x: f(w, x)  # noqa: E731
    for transforms, name in stack:
        composed = LAYERS[name](transforms, composed)
    value = total(composed(x))
    if outside == "nothing":
        return [value.detach()]
    twice = outside == "double backward"
    first = torch.autograd.grad(value, (w, x), create_graph=twice, materialize_grads=True)
    if not twice:
        return [value.detach(), *first]
    score = sum(g.cos().sum() for g in first)
    second = torch.autograd.grad(score, (w, x), materialize_grads=True)
    return [value.detach(), *(g.detach() for g in first), *second]


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(60))
def test_as_the_twin(seed):
    draw = random.Random(seed)
    stack = [
        (draw.choice([torch.func, functx]), draw.choice(sorted(LAYERS)))
        for _ in range(draw.randint(1, 3))
    ]
    outside = draw.choice(["nothing", "backward", "double backward"])
    expected = results(twin, stack, outside)
    for a, b in zip(results(OURS, stack, outside), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
