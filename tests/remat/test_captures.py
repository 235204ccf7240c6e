"""What a region reads otherwise than by argument gets its gradient, at every level.

A tensor ``w`` is held in one of many ways; each loss of it is differentiated by each stack.
"""

import functools

import pytest
import torch
from torch import nn

import functx

from .programs import STACKS, X, Y, batch, check, naive, numbers, squared

HELD = {}
"""A global, for one of the ways."""


def global_read(x):
    return (x * HELD["w"]).sin() * HELD["w"]


class Holder:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return (x * self.w).sin() * self.w


def way(f):
    """From a way to hold ``w``: ``f(w)`` is what a region is made of."""
    return lambda remat, w: remat(f(w))


def in_a_global(remat, w):
    HELD["w"] = w
    return remat(global_read)


WAYS = {
    "a cell": way(lambda w: lambda x: (x * w).sin() * w),
    "a partial": way(lambda w: functools.partial(lambda w, x, v: (x * w).sin() * v, w, v=w)),
    "an attribute": way(lambda w: (lambda h: lambda x: h(x))(Holder(w))),
    "a list in a dict": way(lambda w: lambda x, d={"w": [w]}: (x * d["w"][0]).sin() * d["w"][0]),
    "a global": in_a_global,
    "with history": way(lambda w: (lambda v: lambda x: (x * v).sin() * v)(w.exp())),
    "a part of it": way(lambda w: (lambda v: lambda x: (x * v).sin() * v[0])(w[1:])),
    "a view made inside": way(lambda w: lambda x: (x * w.view(1, 3)[0]).sin() * w[:1]),
    "only in a list of operands": way(lambda w: lambda x: torch.stack([x.sin(), w, w]).prod(0)),
    "met late": way(lambda w: lambda x: x.sin().sin().exp().cos() * w * w),
    "inside a region in it": lambda remat, w: remat(
        lambda x: remat(lambda y: (y * w).sin())(x.sin()) * w
    ),
    "inside a transform in it": lambda remat, w: remat(
        lambda x: functx.grad(lambda y: (y * w).sin().sum())(x) * w
    ),
    "inside a transform and a region": lambda remat, w: remat(
        lambda x: functx.grad(lambda y: remat(lambda y: (y * w).sin() * w)(y).sum())(x)
    ),
    "as its result": lambda remat, w: (
        lambda x: torch.mul(*remat(lambda x: (x.sin().sin(), w))(x)) * remat(lambda x: w)(x)
    ),
}


def loss_of(name, remat):
    """A loss of ``w``, with a constant argument and one that ``w`` has gone into."""

    def loss(w):
        f = WAYS[name](remat, w)
        return (f(X[1:] if name == "a part of it" else X) * 2).sum() + (
            f(w.cos()[1:] if name == "a part of it" else w.cos()).square().sum()
        )

    return loss


def pairs():
    """Each way by two of the eight stacks; by all of them in a sweep."""
    for i, name in enumerate(WAYS):
        for j, stack in enumerate(STACKS):
            marks = () if (i + j) % 8 in (0, 3) else pytest.mark.sweep
            yield pytest.param(name, stack, marks=marks)


@pytest.mark.parametrize(("name", "stack"), [*pairs()])
def test_of_a_tensor_that_is_held_as(name, stack):
    check(lambda remat: STACKS[stack](loss_of(name, remat), Y))


@pytest.mark.parametrize("name", WAYS)
def test_below_a_transform_of_another_tensor(name):
    """The region is differentiated by its argument, and then by what it holds."""

    def program(remat):
        w = Y.clone().requires_grad_()
        if name == "a part of it":
            f = WAYS[name](remat, torch.cat([w[:1], w]))
        else:
            f = WAYS[name](remat, w)
        gradient = functx.grad(squared(f))(X)
        each = functx.vmap(functx.grad(squared(f)))(batch(X))
        return gradient, each, torch.autograd.grad(gradient.sum() + each.square().sum(), w)

    check(program)


UP = {
    "grad": lambda f, x: functx.grad(lambda w: f(w).sum())(x),
    "vjp": lambda f, x: functx.vjp(f, x)[1](Y)[0],
    "jvp": lambda f, x: functx.jvp(f, (x,), (Y,))[1],
    "vmap": lambda f, x: functx.vmap(f)(batch(x)).sum(0),
    "jacrev": lambda f, x: functx.jacrev(f)(x).sum(0),
    "jacfwd": lambda f, x: functx.jacfwd(f)(x).sum(0),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(a, b, marks=() if (i + j) % 3 == 0 else pytest.mark.sweep)
        for i, a in enumerate(UP)
        for j, b in enumerate(UP)
    ],
)
def test_of_two_levels_at_once(first, second):
    def program(remat):
        base = Y.clone().requires_grad_()

        def outer(a):
            return UP[second](
                lambda b: remat(lambda x: torch.exp(x * a.sin() * b) * base.cos())(X), Y
            )

        out = UP[first](outer, X)
        return out, torch.autograd.grad(out.sum(), base)

    check(program, replays=False)


@pytest.mark.parametrize(
    ("stack", "depth"), [("vmap(grad)", 2), ("grad(grad)", 3), ("backward", 2)]
)
def test_of_regions_that_capture_what_an_ended_level_made(stack, depth):
    def program(remat):
        def loss(w):
            def step(x):
                return x - w * functx.grad(lambda x: torch.sin(x * w).sum())(x)

            for _ in range(depth):
                step = remat(lambda x, inner=step: inner(x * w))
            return step(X).sum()

        return STACKS[stack](loss, Y)

    check(program)


@pytest.mark.parametrize(
    ("first", "stack"), [("wrapper", "grad"), ("value", "vmap(grad)"), ("wrapper", "grad(grad)")]
)
def test_of_a_tensor_and_its_own_value(stack, first):
    """What is differentiated and what it was called with, which is a constant."""

    def program(remat):
        def loss(w, value=Y):
            def step(x):
                return torch.sin(x * w * value.exp() if first == "wrapper" else x * value.exp() * w)

            return remat(lambda x: remat(step)(x))(X).sum()

        return STACKS[stack](loss, Y)

    check(program)


class TestModules:
    def net(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def test_parameters_by_backward_and_below_vmap_of_grad(self):
        def program(remat):
            net = self.net()
            plain = remat(lambda x: net(x).sin())(numbers(5, 3))
            found = torch.autograd.grad(plain.sum(), list(net.parameters()))
            each = functx.vmap(functx.grad(lambda x: remat(net)(x).sum()))(numbers(5, 3))
            return found, each, torch.autograd.grad(each.sum(), net[0].weight)

        check(program)


def test_the_check_can_fail():
    w, x = Y.clone().requires_grad_(), X.clone().requires_grad_()
    for remat, lost in ((naive, True), (functx.remat, False)):
        y = remat(lambda x: (x * w).sin())(x)
        (found,) = torch.autograd.grad(y.sum(), w, allow_unused=True)
        assert (found is None) is lost
