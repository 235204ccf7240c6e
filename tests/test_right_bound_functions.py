"""What a custom Function keeps for its backward beside numbers: functions, containers, objects."""

import pytest
import torch
from bound import (
    BOUND,
    DEPTHS,
    Factor,
    Settings,
    Slotted,
    identity,
)
from cases import numbers
from references import assert_same
from torch.autograd import grad

import functx


class Keeps(torch.autograd.Function):
    """Its backward is a function that it is given."""

    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.f(g), None


class Names(Keeps):
    """It keeps what is not compared."""

    @staticmethod
    def forward(ctx, x, f):
        ctx._f = f
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx._f(g), None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("function", [Keeps, Names])
@pytest.mark.parametrize("make", BOUND)
def test_a_function_that_keeps_another_one(make, function, depth):
    def program(remat):
        settings, x = Settings(), numbers(3).requires_grad_()
        f = lambda x: function.apply(x.sin(), make(settings)).exp()  # noqa: E731
        y = depth(f)(remat)(x).sum()
        settings.set(5.0)
        first = grad(y, x, retain_graph=True)
        settings.set(7.0)
        return first, grad(y, x)

    assert_same(program(functx.remat), program(identity), eps=64)


@pytest.mark.parametrize("depth", DEPTHS)
def test_another_function_is_an_error(depth):
    flag, x = [True], numbers(3).requires_grad_()
    double, triple = (lambda g: g * 2), (lambda g: g * 3)
    f = lambda x: Keeps.apply(x.sin(), double if flag[0] else triple).exp()  # noqa: E731
    y = depth(f)(functx.remat)(x).sum()
    flag[0] = False
    with pytest.raises(functx.ReplayError, match="where it kept"):
        grad(y, x)


@pytest.mark.parametrize("function", [Keeps, Names])
def test_a_function_finds_variables_as_they_are(function):
    def program(remat):
        k = calls = 0

        def f(x):
            def pulled_back(g):
                nonlocal calls
                calls += 1
                return g * calls * k

            return function.apply(x.sin(), pulled_back).exp()

        x, found = numbers(3).requires_grad_(), []
        y = remat(f)(x).sum()
        for i in range(1, 4):
            k = float(i)
            found += grad(y, x, retain_graph=True)
        return calls, found

    (called, ours), (calls, theirs) = program(functx.remat), program(identity)
    assert called == calls == 3
    assert_same(ours, theirs, eps=64)


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, made):
        ctx.held = made()
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        held = ctx.held
        return g * (
            held.k if hasattr(held, "k") else held["k"] if type(held) is dict else held[0]
        ), None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "how", [Factor, Slotted, lambda k: [k], lambda k: (k,), lambda k: {"k": k}]
)
def test_what_a_function_keeps_in_containers_and_objects(how, depth):
    def program(remat):
        settings, x = Settings(), numbers(3).requires_grad_()
        f = lambda x: Holds.apply(x.sin(), lambda: how(settings.k)).exp()  # noqa: E731
        y = depth(f)(remat)(x).sum()
        settings.set(5.0)
        return grad(y, x)

    assert_same(program(functx.remat), program(identity), eps=64)
