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
