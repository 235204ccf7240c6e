"""Derivatives stop in JAX exactly where torch stops them, inside regions too."""

import jax
import pytest
import torch

import functx
from functx.compat import to_jax

from ..helpers import arrays, assert_close

X = torch.linspace(-1.0, 1.0, 5)


def no_grad_block(x):
    with torch.no_grad():
        s = torch.sin(x)
    return s * torch.tanh(x)


def write_to_a_view_without_grad(x):
    y = x * 3
    with torch.no_grad():
        y[1:3].mul_(2)
    return torch.sin(y)


def detached_in_place(x):
    y = x * 3
    y.detach_()
    return y * x


CASES = {
    "no_grad": no_grad_block,
    "detach": lambda x: x.detach() * torch.tanh(x),
    "detach_": detached_in_place,
    "write to a view in no_grad": write_to_a_view_without_grad,
    "enable_grad in no_grad": lambda x: torch.no_grad()(torch.enable_grad()(torch.exp))(x),
    "grad without create_graph": lambda x: x * _inner_gradient(x, False),
    "grad with create_graph": lambda x: x * _inner_gradient(x, True),
}


def _inner_gradient(x, create_graph):
    y = x * 1
    if not y.requires_grad:
        y.requires_grad_()
    return torch.autograd.grad((torch.sigmoid(y) ** 3).sum(), y, create_graph=create_graph)[0]


def _jacobian(f):
    return torch.autograd.functional.jacobian(f, X)


@pytest.mark.parametrize("name", CASES)
def test_a_derivative_stops_where_torch_stops_it(name):
    f = CASES[name]
    assert_close(to_jax(f)(arrays(X)), f(X))
    regions = [f] if name.startswith("grad") else [f, functx.remat(f)]
    for g in regions:
        assert_close(jax.jacrev(to_jax(g))(arrays(X)), _jacobian(f))


@pytest.mark.parametrize("op", [torch.tanh, torch.softmax])
def test_saved_outputs_are_not_cut(op):
    """Autograd detaches outputs that it saves; cut there, second derivatives would be wrong."""

    def f(x):
        y = op(x + 2, *((0,) if op is torch.softmax else ()))
        return torch.autograd.grad((y**2).sum(), x, create_graph=True)[0]

    x = X.clone().requires_grad_()

    def in_jax(x):
        return f(x * 1 if x.requires_grad else x.requires_grad_())

    expected = torch.autograd.functional.jacobian(f, x)
    assert_close(jax.jacrev(to_jax(in_jax))(arrays(X)), expected)
