"""An object that a region reaches, and stores a result of it in: neither outlives the other.

The node of a region keeps the function that it runs again, that may keep the object, and the object
holds what leads to the node. The garbage collector sees that, as without a region, if nothing that
it can't look into (a hook on a node is held by C++) leads to the function as well.
"""

import gc
import weakref

import pytest
import torch
from cases import numbers
from torch import nn

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

# Cotangents that are worth it are handed over by a hook on the node; others are not.
SIZES = {"small": 3, "large": 32}


class State:
    pass


class Net(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        self.h = (x @ self.w).sin()
        return self.h * 2


class Owner:
    def __init__(self, w):
        self.w = w

    def method(self, x):
        self.h = (x @ self.w).sin()
        return self.h * 2


def stored(s, w):
    s.h = s.x @ w
    return s.h.sin()


def beside(s, w):
    s.h = s.x @ w
    return (s.x @ w).sin()


def returned(s, w):
    s.h = s.x @ w
    return s.h


def given(body):
    def program(x, w):
        s = State()
        s.x = x
        return s, functx.remat(body)(s, w)

    return program


def closed_over(x, w):
    s = State()
    s.x = x
    return s, functx.remat(lambda: stored(s, w))()


def nested(x, w):
    s = State()
    s.x = x
    return s, functx.remat(lambda s: functx.remat(stored)(s, w).sin())(s)


def of_a_list(x, w):
    s = State()
    s.x, s.kept = x, []

    def body(s):
        s.kept.append(s.x @ w)
        return s.kept[0].sin()

    y = functx.remat(body)(s)
    s.h = s.kept[0]
    return s, y


def a_module(x, w):
    net = Net(w)
    return net, functx.remat(net)(x)


def a_method(x, w):
    owner = Owner(w)
    return owner, functx.remat(owner.method)(x)


PROGRAMS = {
    "stored": given(stored),
    "beside": given(beside),
    "returned": given(returned),
    "closed over": closed_over,
    "nested": nested,
    "of a list": of_a_list,
    "a module": a_module,
    "a method": a_method,
}

PULLED_BACK = {
    "the result": lambda s, y: y.sum(),
    "what is stored": lambda s, y: s.h.sum(),
    "both": lambda s, y: y.sum() + s.h.sum(),
    "nothing": None,
}


@pytest.mark.parametrize("pulled_back", PULLED_BACK)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_left_of_an_object_and_what_it_holds(name, size, pulled_back):
    n = SIZES[size]
    program, value = PROGRAMS[name], PULLED_BACK[pulled_back]
    alive = []
    for _ in range(6):  # from the fourth run on, the code is known
        x, w = numbers(n, n).requires_grad_(), nn.Parameter(numbers(n, n, start=1.0))
        s, y = program(x, w)
        assert s.h.requires_grad
        if value is not None:
            value(s, y).backward()
            assert x.grad is not None
        alive += map(weakref.ref, (s, s.h, y, x, w))
        del s, y, x, w
    gc.collect()
    assert not [ref() for ref in alive if ref() is not None]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_stored_can_be_pulled_back_when_the_result_has_gone(size):
    n = SIZES[size]
    x, w = numbers(n, n).requires_grad_(), numbers(n, n, start=1.0)
    s, y = PROGRAMS["stored"](x, w)
    del y
    gc.collect()
    (gradient,) = torch.autograd.grad(s.h.sum(), x)
    torch.testing.assert_close(gradient, torch.ones(n, n).double() @ w.mT, rtol=0, atol=0)


def two_stored(s, w):
    s.h = s.x @ w
    s.k = s.h.cos()
    return s.h.sin() * s.k


def the_loss(x, w):
    s = State()
    s.x = x
    s.h = functx.remat(lambda: (s.x @ w).sin())().exp().sum()
    return s, s.h * 2


def of_a_derivative(x, w):
    s = State()
    s.x = x
    y = functx.remat(lambda: (s.x @ w).sin())().sum()
    (s.h,) = torch.autograd.grad(y, x, create_graph=True)
    return s, s.h.sum().exp()


AFTER = {"two stored": given(two_stored), "the loss": the_loss, "of a derivative": of_a_derivative}


@pytest.mark.parametrize("pulled_back", ["the result", "what is stored", "both"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", AFTER)
def test_nothing_is_left_after_a_backward(name, size, pulled_back):
    """Where the way to the node is through tapes, it has let go of the function."""
    n = SIZES[size]
    alive = []
    for _ in range(6):
        x, w = numbers(n, n).requires_grad_(), nn.Parameter(numbers(n, n, start=1.0))
        s, y = AFTER[name](x, w)
        PULLED_BACK[pulled_back](s, y).backward()
        alive += map(weakref.ref, (s, s.h, y, x, w))
        del s, y, x, w
    gc.collect()
    assert not [ref() for ref in alive if ref() is not None]


@pytest.mark.parametrize("runs", [1, 6])
class TestRunsAgain:
    """What a node still needs, it keeps."""

    def gradients(self, runs, of):
        for _ in range(runs):
            s, x = State(), numbers(3, 3).requires_grad_()
            s.x = x
            found = of(x, functx.remat(lambda s=s: s.x.sin()))
            plain = of(x, lambda s=s: s.x.sin())
        torch.testing.assert_close(found, plain, rtol=0, atol=0)

    def test_a_second_backward_is_an_error(self, runs):
        for _ in range(runs):
            s = State()
            s.x = numbers(3, 3).requires_grad_()
            value = functx.remat(lambda s=s: s.x.sin())().sum()
            value.backward()
            with pytest.raises(RuntimeError, match="through the graph a second time"):
                value.backward()

    def test_a_graph_that_is_kept(self, runs):
        def of(x, f):
            y = f().sum()
            first = torch.autograd.grad(y, x, retain_graph=True)
            return *first, *torch.autograd.grad(y, x, retain_graph=True), *torch.autograd.grad(y, x)

        self.gradients(runs, of)

    def test_a_derivative_whose_own_graph_is_not_kept(self, runs):
        def of(x, f):
            y = f().sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True, retain_graph=False)
            del y
            return torch.autograd.grad(first.square().sum(), x)

        self.gradients(runs, of)

    def test_results_one_by_one(self, runs):
        for _ in range(runs):
            s, x = State(), numbers(3, 3).requires_grad_()
            s.x = x
            a, b = functx.remat(lambda s=s: (s.x.sin(), s.x.cos()))()
            (of_a,) = torch.autograd.grad(a.sum(), x)
            (of_b,) = torch.autograd.grad(b.sum(), x)
            torch.testing.assert_close((of_a, of_b), (x.cos(), -x.sin()), rtol=0, atol=0)
            with pytest.raises(RuntimeError, match="through the graph a second time"):
                torch.autograd.grad(b.sum(), x)

    def test_a_node_that_saved_nothing(self, runs):
        for _ in range(runs):
            s, x = State(), numbers(3, 3).requires_grad_()
            s.x = x
            y = functx.remat(lambda s=s: s.x * 2)().sum()
            for _ in range(2):
                (gradient,) = torch.autograd.grad(y, x)
                assert gradient.eq(2).all()
