"""Generators and iterators that a region makes, and that hooks draw from. See `_bound`."""

import itertools
import random

import numpy as np
import pytest
import torch
from bound import DEPTHS, identity
from cases import numbers
from references import assert_same
from torch.autograd import Function, grad

import functx


def of_python():
    rng = random.Random(3)
    return rng.random


def of_numpy():
    rng = np.random.default_rng(3)
    return rng.random


def of_numpy_as_it_was():
    rng = np.random.RandomState(3)
    return rng.rand


def of_torch():
    rng = torch.Generator().manual_seed(3)
    return lambda: torch.rand(3, generator=rng, dtype=torch.float64)


class Draws(Function):
    @staticmethod
    def forward(ctx, x, draw):
        ctx.draw = draw
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.draw(), None


def by_a_hook(h, draw):
    h.register_hook(lambda g: g * draw())
    return h * 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("by", [by_a_hook, Draws.apply])
@pytest.mark.parametrize("is_handed_out", [False, True])
@pytest.mark.parametrize("make", [of_python, of_numpy, of_numpy_as_it_was, of_torch])
def test_each_backward_pass_draws_on(make, is_handed_out, by, depth):
    def program(remat):
        handed_out = []

        def f(x):
            draw = make()
            if is_handed_out:
                handed_out.append(draw)
            return by(x.sin(), draw).exp()

        x = numbers(3).requires_grad_()
        y = depth(f)(remat)(x).sum()
        found = []
        for _ in range(3):
            found += grad(y, x, retain_graph=True)
            found += [torch.as_tensor(draw()) for draw in handed_out[:1]]
        return found

    assert_same(program(functx.remat), program(identity), eps=64)


def test_what_has_no_state_to_be_read_is_left_alone():
    """As that of the operating system."""

    def f(x):
        rng, h = random.SystemRandom(), x.sin()
        h.register_hook(lambda g: g * (rng.random() < 2))
        return h.exp()

    x = numbers(3).requires_grad_()
    y = functx.remat(f)(x).sum()
    for _ in range(2):
        assert_same(grad(y, x, retain_graph=True), grad(f(x).sum(), x), eps=64)


def counting():
    return itertools.count(2)


def a_list():
    return iter([2, 3, 4, 5])


def a_range():
    return iter(range(2, 9))


def generated():
    yield 2
    yield 3


ITERATORS = [
    counting,
    a_list,
    a_range,
    generated,
    lambda: enumerate(range(9)),
    lambda: zip(a_list()),
]


def number_of(x):
    return x[0] + 1 if isinstance(x, tuple) else x


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("make", ITERATORS)
def test_an_iterator_that_hooks_take_from_serves_one_pass(make, depth):
    def f(x):
        it = make()
        h = x.sin()
        h.register_hook(lambda g: g * number_of(next(it)))
        return h.exp()

    x = numbers(3).requires_grad_()
    y = depth(f)(functx.remat)(x).sum()
    assert_same(grad(y, x, retain_graph=True), grad(f(x).sum(), x), eps=64)
    with pytest.raises(functx.ReplayError, match="in the forward of the region"):
        grad(y, x)


@pytest.mark.parametrize("make", ITERATORS)
def test_an_iterator_that_is_handed_out(make):
    handed_out = []

    def f(x):
        it = make()
        handed_out.append(it)
        h = x.sin()
        h.register_hook(lambda g: g * number_of(next(it)))
        return h.exp()

    x = numbers(3).requires_grad_()
    y = functx.remat(f)(x).sum()
    with pytest.raises(functx.RematError, match="held outside of it"):
        grad(y, x, retain_graph=True)
    next(handed_out[0])
    with pytest.raises(functx.RematError, match="in the forward of the region"):
        grad(y, x)
