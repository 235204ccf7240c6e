"""Plain autograd inside a lowered function goes through regions, and through what they capture."""

import jax
import pytest
import torch

import functx
from functx.compat import to_jax

from .networks import arrays, assert_close, count_dots
from .test_regions import LAYERS, PLAIN, chain, weights

X = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
W = torch.linspace(-0.4, 0.6, 25, dtype=torch.float64).reshape(5, 5).requires_grad_()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0] * 4


def one(x):
    return functx.remat(lambda x: x.sin() * x.cos())(x) + x**2


def captured(x):
    return functx.remat(lambda h: torch.tanh(W @ h) * x)(x.sin()) + x


def nested(x):
    inner = functx.remat(lambda x: x.sin() * x)
    return functx.remat(lambda x: inner(x).cos() + functx.vmap(functx.remat(torch.tanh))(x))(x)


def custom(x):
    return functx.remat(Twice.apply)(x) + Twice.apply(x.sin())


def policy(x):
    keep = functx.checkpoint_policies.dots_saveable
    return functx.remat(lambda x: torch.tanh(W @ x.sin()), policy=keep)(x)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("body", [one, captured, nested, custom, policy])
def test_gradients_inside(body, create_graph):
    def f(x):
        y = x.detach().clone().requires_grad_() if not create_graph else x * 1
        if not y.requires_grad:
            y.requires_grad_()
        (g,) = torch.autograd.grad(body(y).sin().sum(), y, create_graph=create_graph)
        return g * x

    assert_close(to_jax(f)(arrays(X)), f(X))
    expected = torch.autograd.functional.jacobian(f, X)
    assert_close(jax.jacrev(to_jax(f))(arrays(X)), expected)


@pytest.mark.parametrize("body", [captured, policy])
def test_gradients_of_what_a_region_captures(body):
    def f(x):
        return torch.autograd.grad(body(x).sin().sum(), W, create_graph=True)[0] @ x

    assert_close(to_jax(f)(arrays(X)), f(X.clone().requires_grad_()))
    expected = torch.autograd.functional.jacobian(f, X)
    assert_close(jax.jacrev(to_jax(f))(arrays(X)), expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_products(create_graph):
    """The replay stays one: XLA does not merge it with the forward pass."""

    def f(ws, x):
        ws = [w.requires_grad_() for w in ws]
        return torch.autograd.grad(chain(2)(ws, x), ws, create_graph=create_graph)

    assert count_dots(to_jax(f), *arrays(weights())) == PLAIN + LAYERS
