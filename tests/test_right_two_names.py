"""Functions whose backward differentiates, by tensors they were given, what closes over these.

Solvers of differential equations (the adjoint method) and reversible layers are written so: they
are given a module and its parameters. ``NOTE [two names]`` in `_other_names`.
"""

import pytest
import torch
from references import assert_same
from right import identity
from torch import nn

import functx


class Again(torch.autograd.Function):
    """Computes ``f`` again in its backward, and differentiates that by ``tensors``."""

    unused = True

    @staticmethod
    def forward(ctx, f, x, *tensors):
        with torch.no_grad():
            y = f(x)
        ctx.f, ctx.tensors = f, tensors
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.f(x)
        by = (x, *ctx.tensors)
        return None, *torch.autograd.grad(y, by, gradient, allow_unused=Again.unused)


class Accumulating(torch.autograd.Function):
    """Its backward has the gradient of a weight accumulated."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.tanh(x @ ctx.weight).backward(gradient, retain_graph=True)
        return x.grad, None


def parameters(remat, net, x):
    return remat(lambda x: Again.apply(net, x.sin(), *net.parameters()).cos())(x)


def arguments(remat, net, x):
    region = remat(lambda x, *tensors: Again.apply(net, x.sin(), *tensors).cos())
    return region(x, *net.parameters())


def nested(remat, net, x):
    return remat(lambda x: parameters(remat, net, x * 2).sin())(x)


def a_region_that_runs_in_the_backward(remat, net, x):
    return parameters(remat, remat(net), x)


def each_in_another(remat, net, x):
    def inner(x):
        return Again.apply(net, x, *net.parameters()).sin()

    return remat(lambda x: Again.apply(inner, x.sin(), *net.parameters()).cos())(x)


def computed_weights(remat, net, x):
    weight = net[0].weight * 2
    return remat(lambda x: Again.apply(lambda x: (x @ weight).tanh(), x.sin(), weight))(x)


def computed_weights_each_in_another(remat, net, x):
    weight = net[0].weight * 2

    def inner(x):
        return Again.apply(lambda x: (x @ weight).tanh(), x, weight).sin()

    return remat(lambda x: Again.apply(inner, x.sin(), weight).cos())(x)


def accumulated(remat, net, x):
    return remat(lambda x: Accumulating.apply(x.sin(), net[0].weight).cos())(x)


def accumulated_through_computed_weights(remat, net, x):
    weight = net[0].weight * 2
    return remat(lambda x: Accumulating.apply(x.sin(), weight).cos())(x)


PROGRAMS = [
    *(parameters, arguments, nested, a_region_that_runs_in_the_backward, each_in_another),
    *(computed_weights, computed_weights_each_in_another, accumulated),
    accumulated_through_computed_weights,
]


def run(program, remat, hooks=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    seen = []
    if hooks:
        for p in net.parameters():
            p.register_hook(lambda g: seen.append(None if g is None else g.clone()))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    program(remat, net, x).sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())], seen


@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_they_get_their_gradients(program, hooks):
    expected, seen = run(program, identity, hooks)
    assert expected[1] is not None
    actual, seen_now = run(program, functx.remat, hooks)
    assert_same(actual, expected, eps=8)
    assert len(seen_now) == len(seen)


def test_unused_is_an_error_where_it_is_one_without(monkeypatch):
    monkeypatch.setattr(Again, "unused", False)

    def program(remat, net, x):
        return remat(lambda x: Again.apply(torch.sin, x, net[0].weight * 2))(x)

    for remat in (identity, functx.remat):
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            run(program, remat)


def test_gradients_asked_for_and_a_second_time():
    def gradients(remat):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        y = parameters(remat, net, x).sum()
        some = torch.autograd.grad(y, [net[0].weight], retain_graph=True)
        return some, torch.autograd.grad(y, [x, *net.parameters()], create_graph=True)

    assert_same(gradients(functx.remat), gradients(identity), eps=8)


class ByItsOtherName(torch.autograd.Function):
    """Computes with what it saved, and asks by the name that its module has for that."""

    asked = "other"

    @staticmethod
    def forward(ctx, x, weight, held):
        ctx.save_for_backward(x, weight)
        ctx.held = held
        return (x * weight).sin()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = (x * weight).sin()
        by = (x, ctx.held[0]) if ByItsOtherName.asked == "other" else (x, weight, ctx.held[0])
        first, *those = torch.autograd.grad(y, by, gradient, allow_unused=True)
        return first, sum(those) / len(those), None


@pytest.mark.parametrize("asked", ["other", "both"])
def test_a_gradient_by_the_name_that_was_not_saved(asked, monkeypatch):
    monkeypatch.setattr(ByItsOtherName, "asked", asked)

    def run(remat):
        x, weight = (torch.linspace(0.1 + i, 1.0, 8).requires_grad_() for i in range(2))
        held = [weight]
        y = remat(lambda x: (ByItsOtherName.apply(x * 1, weight, held) + weight).exp())(x)
        return y, *torch.autograd.grad(y.sum(), (x, weight))

    assert_same(run(functx.remat), run(identity))
