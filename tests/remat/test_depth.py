"""Regions in regions: fifty deep at the base level, twenty under three transforms."""

import pytest
import torch
from cases import numbers
from references import assert_same

import functx

X = numbers(4)


def nested(depth, remat=functx.remat):
    """``sin`` of ``x * 1.1`` again and again, one region in another."""

    def f(x):
        return (x * 1.1).sin()

    for _ in range(depth):
        f = remat(lambda x, inner=f: inner((x * 1.1).sin()))
    return f


def plain(depth):
    return nested(depth, lambda f: f)


def test_fifty_at_the_base_level():
    def gradient(f):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)

    assert_same(gradient(nested(50)), gradient(plain(50)), eps=8)


THREE = {
    "vmap(vmap(grad))": lambda f: functx.vmap(functx.vmap(functx.grad(f)))(numbers(2, 2, 4)),
    "vmap(jacrev(grad))": lambda f: functx.vmap(functx.jacrev(functx.grad(f)))(numbers(2, 4)),
    "grad of jvp of vmap": lambda f: functx.grad(
        lambda x: functx.jvp(lambda x: functx.vmap(f)(x).sum(), (x,), (x,))[1]
    )(numbers(2, 4)),
}


@pytest.mark.parametrize(
    "stack",
    [
        "vmap(vmap(grad))",
        pytest.param("vmap(jacrev(grad))", marks=pytest.mark.sweep),
        pytest.param("grad of jvp of vmap", marks=pytest.mark.sweep),
    ],
)
def test_twenty_under_three_transforms(stack):
    def gradient(f):
        return THREE[stack](lambda x: f(x).sum())

    assert_same(gradient(nested(20)), gradient(plain(20)), eps=64)


def test_a_hundred_in_a_row():
    def chain(remat):
        x = y = X.clone().requires_grad_()
        for _ in range(100):
            y = remat(lambda y: (y * 1.1).sin())(y)
        return torch.autograd.grad(y.sum(), x)

    assert_same(chain(functx.remat), chain(lambda f: f))
