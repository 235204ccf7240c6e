"""Rule 3: an input that was written to between forward and backward is an error with a line."""

import re

import pytest
import torch
from torch import nn

import functx

from .programs import X, Y, numbers, same


def modified():
    return pytest.raises(functx.ReplayError, match=r"modified (by an )?in-?\s?place")


def names_a_line(caught):
    return re.search(r"test_versions_compared\.py\D{1,12}\d+", str(caught.value))


FUNCTIONS = {
    "an argument": lambda x, w: functx.remat(lambda x, w: (x * w).sin())(x, w),
    "an argument that is a view": lambda x, w: functx.remat(lambda x, w: (x * w).sin())(x, w[:]),
    "captured": lambda x, w: functx.remat(lambda x: (x * w).sin())(x),
    "captured by a region in a region": lambda x, w: functx.remat(
        lambda x: functx.remat(lambda x: (x * w).sin())(x.sin())
    )(x),
}


@pytest.mark.parametrize(
    ("name", "requires_grad"), [(n, i % 2 == 0) for i, n in enumerate(FUNCTIONS)]
)
def test_a_tensor(name, requires_grad):
    w = Y.clone().requires_grad_(requires_grad)
    y = FUNCTIONS[name](X.clone().requires_grad_(), w)
    with torch.no_grad():
        w.mul_(2)
    with modified() as caught:
        y.sum().backward()
    assert names_a_line(caught)


def test_a_parameter_by_an_optimizer():
    net = nn.Linear(3, 3).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    y = functx.remat(lambda x: torch.sin(net(x)))(X).sum()
    y.backward(retain_graph=True)
    optimizer.step()
    with modified() as caught:
        y.backward()
    assert names_a_line(caught)


def test_what_a_vjp_was_called_with():
    x = X.clone()
    y, pullback = functx.vjp(functx.remat(lambda x: (x * x).sin()), x)
    pullback(torch.ones_like(y))
    x.mul_(2)
    with modified() as caught:
        pullback(torch.ones_like(y))
    assert names_a_line(caught)


def test_a_result_is_the_users_to_write_to():
    """Where its derivative does not read it."""
    x = X.clone().requires_grad_()
    y = functx.remat(lambda x: x.sin().sin() * Y)(x)
    y.mul_(2)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    z = 2 * (x.sin().sin() * Y)
    same(gradient, torch.autograd.grad(z.sum(), x)[0])


def test_a_tensor_written_to_before_the_call_or_after_the_backward_is_none():
    w = numbers(3).requires_grad_()
    with torch.no_grad():
        w.mul_(2)
    y = functx.remat(lambda w: (X * w).sin().sin())(w).sum()
    (gradient,) = torch.autograd.grad(y, w)
    with torch.no_grad():
        w.zero_()
    expected = functx.grad(lambda w: (X * w).sin().sin().sum())(2 * numbers(3))
    same(gradient, expected)
