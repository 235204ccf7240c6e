"""A lowered function under every JAX transform, and with transforms of torch inside."""

import collections

import jax
import pytest
import torch
from jax import lax

import functx
from functx.compat import to_jax

from ..helpers import arrays, assert_close

X = torch.linspace(-1.0, 1.0, 6)


def f(x):
    return torch.tanh(x * 2) * x.flip(0)


def loss(x):
    return f(x).sum()


COMPOSITIONS = {
    "jit": (jax.jit, lambda g: g, f),
    "grad": (jax.grad, torch.func.grad, loss),
    "vmap(grad)": (
        lambda g: jax.vmap(jax.grad(g)),
        lambda g: torch.vmap(torch.func.grad(g)),
        lambda x: torch.sin(x) * x,
    ),
    "jvp": (
        lambda g: lambda x: jax.jvp(g, (x,), (x,))[1],
        lambda g: lambda x: torch.func.jvp(g, (x,), (x,))[1],
        f,
    ),
    "vjp": (
        lambda g: lambda x: jax.vjp(g, x)[1](x)[0],
        lambda g: lambda x: torch.func.vjp(g, x)[1](x)[0],
        f,
    ),
    "jvp(grad)": (
        lambda g: lambda x: jax.jvp(jax.grad(g), (x,), (x,))[1],
        lambda g: lambda x: torch.func.jvp(torch.func.grad(g), (x,), (x,))[1],
        loss,
    ),
    "grad(jvp)": (
        lambda g: lambda x: jax.grad(lambda y: jax.jvp(g, (y,), (x,))[1])(x),
        lambda g: lambda x: torch.func.grad(lambda y: torch.func.jvp(g, (y,), (x,))[1])(x),
        loss,
    ),
    "hessian": (jax.hessian, torch.func.hessian, loss),
    "checkpoint": (lambda g: jax.grad(jax.checkpoint(g)), torch.func.grad, loss),
    "grad(scan(checkpoint))": (
        lambda g: jax.grad(
            lambda x: lax.scan(lambda c, _: (jax.checkpoint(g)(c), None), x, length=3)[0].sum()
        ),
        lambda g: torch.func.grad(lambda x: g(g(g(x))).sum()),
        f,
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_transform_of_jax_is_that_of_torch(name):
    in_jax, in_torch, g = COMPOSITIONS[name]
    assert_close(jax.jit(in_jax(to_jax(g)))(arrays(X)), in_torch(g)(X), rtol=1e-5)


TRANSFORMS_INSIDE = {
    "grad": lambda: functx.grad(loss),
    "vmap(grad)": lambda: functx.vmap(functx.grad(lambda x: torch.sin(x) * x)),
    "jvp": lambda: lambda x: functx.jvp(f, (x,), (x,))[1],
    "jacrev": lambda: functx.jacrev(f),
    "jacfwd": lambda: functx.jacfwd(f),
    "hessian": lambda: functx.hessian(loss),
}


@pytest.mark.parametrize("name", TRANSFORMS_INSIDE)
def test_a_transform_inside_is_that_of_torch_and_can_be_differentiated(name):
    g = TRANSFORMS_INSIDE[name]()
    assert_close(jax.jit(to_jax(g))(arrays(X)), g(X), rtol=1e-5)
    expected = torch.func.jacfwd(g)(X)
    assert_close(jax.jit(jax.jacrev(to_jax(g)))(arrays(X)), expected, rtol=1e-5)


def test_pytrees_go_in_and_out():
    Pair = collections.namedtuple("Pair", "a b")

    def g(tree, scale=1.0):
        return {"sum": tree["x"] + tree["pair"].a, "list": [tree["pair"].b * scale, None, 3]}

    tree = {"x": X, "pair": Pair(X, 2 * X)}
    got = to_jax(g)(arrays(tree), scale=2.0)
    assert_close([got["sum"], got["list"][0]], [2 * X, 4 * X])
    assert got["list"][1:] == [None, 3]


def test_writes_to_views_are_as_in_torch():
    def g(x):
        y = x * 1
        y[1:3].mul_(x[1:3])
        y.view(-1)[0].add_(x[4])
        y[::2] = torch.sin(x[::2])
        return y

    assert_close(to_jax(g)(arrays(X)), g(X))
    expected = torch.func.jacrev(g)(X)
    assert_close(jax.jacrev(to_jax(g))(arrays(X)), expected)
