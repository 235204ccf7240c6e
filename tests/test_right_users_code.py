"""Code of the user's inside of one operation: what it reads is the region's, as the body's own."""

import pytest
import torch
from cases import numbers
from programs import identity
from references import assert_same, count
from torch import nn

import functx

X = numbers(3, 4)


class State:
    """What the user's code reads."""

    def __init__(self, requires_grad=False):
        self.t = numbers(4, start=3.0).requires_grad_(requires_grad)


class Scaled:
    """No tensor, but torch asks it what to do."""

    def __init__(self, state):
        self.state = state

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        given = [*args, *(kwargs or {}).values()]
        given = given[0] if isinstance(given[0], list) else given
        (own,) = (a for a in given if isinstance(a, cls))
        (x,) = (a for a in given if isinstance(a, torch.Tensor))
        return (x * own.state.t).sin() + torch.add(x, own.state.t)


class Refusing:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


class Both(Scaled):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return (args[1] * args[2].state.t).sin()


class Distance(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, a, b):
        return ((a - b) * self.state.t).pow(2).sum(-1)


def distance(state):
    return Distance(state).forward


def inner_region(state):
    def f(a, b):
        return functx.remat(lambda a, b: ((a - b) * state.t).pow(2).sum(-1))(a, b)

    return f


def losses(make):
    def f(x, state):
        return nn.functional.triplet_margin_with_distance_loss(
            x.sin(), x, x.cos(), distance_function=make(state), margin=30.0
        )

    return f


def by_a_module(x, state):
    loss = nn.TripletMarginWithDistanceLoss(distance_function=distance(state), margin=30.0)
    return loss(x, x.exp(), x.cos())


PROGRAMS = {
    "a function": losses(distance),
    "a module": losses(Distance),
    "a region": losses(inner_region),
    "a layer": by_a_module,
    "an object": lambda x, state: torch.add(x, Scaled(state)).sum(),
    "by keyword": lambda x, state: torch.add(input=x, other=Scaled(state)).sum(),
    "an object first": lambda x, state: torch.mul(Scaled(state), x).sum(),
    "in a list": lambda x, state: torch.stack([x, Scaled(state)]).sum(),
}


def assign(state):
    state.t = numbers(4, start=9.0)


def write(state):
    with torch.no_grad():
        state.t.mul_(3)


def regions(remat, name, state, nested):
    def body(x):
        return PROGRAMS[name](x * 2, state)

    return remat(lambda x: remat(body)(x) * 2) if nested else remat(body)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_it_reads_may_be_another_one_in_the_backward(name, nested):
    def run(remat):
        state, found = State(), []
        for _ in range(6):
            x = X.clone().requires_grad_()
            state.t = numbers(4, start=3.0)
            y = regions(remat, name, state, nested)(x)
            assign(state)
            found += [y.detach(), *torch.autograd.grad(y, x)]
        return found

    assert_same(run(functx.remat), run(identity), 8)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_it_reads_has_its_gradient(name, nested):
    def run(remat):
        found = []
        for _ in range(6):
            state, x = State(requires_grad=True), X.clone().requires_grad_()
            y = regions(remat, name, state, nested)(x)
            found += torch.autograd.grad(y, [x, state.t])
        state = State(requires_grad=True)
        f = regions(remat, name, state, nested)
        found.append(functx.grad(f)(X))
        found.append(functx.vmap(functx.grad(f))(torch.stack([X, -X])))
        found += torch.autograd.grad(found[-1].sum(), state.t)
        found.append(functx.hessian(lambda x: f(x[None]))(X[0]))
        return found

    assert_same(run(functx.remat), run(identity), 64)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_it_reads_and_was_written_to_is_an_error(name):
    state, x = State(), X.clone().requires_grad_()
    y = regions(functx.remat, name, state, False)(x)
    write(state)
    with pytest.raises(functx.ReplayError, match="modified in place"):
        torch.autograd.grad(y, x)


@pytest.mark.parametrize("name", ["a function", "an object"])
def test_other_code_in_the_backward_is_an_error(name):
    flag = [True]

    class Flagged(State):
        @property
        def t(self):
            return self.own.sin() if flag[0] else self.own

        @t.setter
        def t(self, value):
            self.own = value

    state, x = Flagged(), X.clone().requires_grad_()
    y = regions(functx.remat, name, state, False)(x)
    flag[0] = False
    with pytest.raises(functx.ReplayError, match="departed"):
        torch.autograd.grad(y, x)


def test_one_that_says_nothing_leaves_it_to_another():
    state, x = State(), X.clone().requires_grad_()

    def body(x):
        return torch.where(Refusing(), x, Both(state))

    ours, expected = functx.remat(body)(x), body(x)
    assert_same(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(expected.sum(), x), 8)


def test_what_torch_refuses():
    with pytest.raises(TypeError, match="handlers returned NotImplemented"):
        torch.add(X, Refusing())
    with pytest.raises(TypeError, match="handlers returned NotImplemented"):
        functx.remat(lambda x: torch.add(x, Refusing()))(X.clone().requires_grad_())


@pytest.mark.parametrize("check", ["values", "none"])
def test_other_checks(check):
    state = State()
    f = functx.remat(lambda x: PROGRAMS["a function"](x, state), determinism_check=check)
    x = X.clone().requires_grad_()
    y, expected = f(x), PROGRAMS["a function"](x, state)
    assert_same(torch.autograd.grad(y, x), torch.autograd.grad(expected, x), 8)


@pytest.mark.parametrize("name", ["a function", "an object"])
def test_a_replay_leaves_out_what_no_pullback_reads(name):
    """Beside such code, and at the end of what it does."""
    state = State()
    state.t = numbers(3, 4, start=3.0)

    def replayed(dead):
        def body(x):
            y = PROGRAMS[name](x.sin(), state)
            return y + x.cos().add(1).add(2).add(3).sum() if dead else y

        x = X.clone().requires_grad_()
        y = functx.remat(body)(x)
        return count(torch.autograd.grad, y, x)["add"]

    assert replayed(True) <= replayed(False) + 1  # two gradients of x are added up
