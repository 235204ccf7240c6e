"""What a custom Function keeps for its backward beside numbers: functions, objects, tuples."""

import pytest
import torch
from bound import Factor, Settings, cell, default, factory, keyword, partial, partial_named
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


class Holds(torch.autograd.Function):
    """Its backward reads what it makes in the forward."""

    @staticmethod
    def forward(ctx, x, make):
        ctx.held = make()
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.held.k if hasattr(ctx.held, "k") else ctx.held[0]), None


def keeps(make):
    return lambda settings, x: Keeps.apply(x.sin(), make(settings)).exp()


def holds(make):
    return lambda settings, x: Holds.apply(x.sin(), lambda: make(settings.k)).exp()


MADE = [cell, default, keyword, factory, partial, partial_named]


@pytest.mark.parametrize("body", [*map(keeps, MADE), holds(Factor), holds(lambda k: (k, "k"))])
def test_other_numbers_are_an_error(body):
    settings, x = Settings(), numbers(3).requires_grad_()
    y = functx.remat(lambda x: body(settings, x))(x).sum()
    assert_same(grad(y, x, retain_graph=True), grad(body(settings, x).sum(), x), eps=64)
    settings.set(5.0)
    with pytest.raises(functx.ReplayError, match=r"keeps other numbers .* in ctx\.(held|f)"):
        grad(y, x)


@pytest.mark.parametrize("of", [lambda f: f, lambda f: functx.remat(f)])
def test_those_of_the_programs_may_change(of):
    """The same function and the same object, in both runs."""

    def program(remat):
        factor = Factor(1.0)

        def counted(g):
            factor.k += 1
            return g * factor.k

        x = numbers(3).requires_grad_()
        body = lambda x: Holds.apply(Keeps.apply(x.sin(), counted), lambda: factor)  # noqa: E731
        y = remat(of(body) if remat is functx.remat else body)(x).sum()
        return [grad(y, x, retain_graph=True) for _ in range(2)]

    assert_same(program(functx.remat), program(lambda f: f), eps=64)


def test_addresses_are_not_compared():
    body = holds(lambda k: (id(object()), 4.0))  # what is there once may be there again, or not
    x, kept = numbers(3).requires_grad_(), []
    body = lambda x: Holds.apply(x, lambda: (2.0, kept.append(object()) or id(kept[-1])))  # noqa: E731
    assert_same(grad(functx.remat(body)(x).sum(), x), grad(body(x).sum(), x))
