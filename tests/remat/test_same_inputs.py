"""Rules 1 and 3: a replay finds all that the region read, at every level; data by its place."""

import functools
import random

import numpy as np
import pytest
import torch
from cases import judged_by
from torch import nn

import functx

from .programs import (
    STACKS,
    X,
    Y,
    batch,
    check,
    every_stack,
    identity,
    naive,
    numbers,
    right_or_raises,
    same,
    squared,
)


class Holder:
    def __init__(self, w=Y):
        self.w = w

    def __call__(self, x):
        return (x * self.w).sin() * self.w


def cells(remat, x):
    w, number, f = Y, 2.0, torch.sin
    y = remat(lambda x: f(x * w) * number * x)(x)
    w, number, f = 5 * Y, 7.0, torch.cos
    return y.sum()


def cells_of_a_function_that_the_region_calls(remat, x):
    w = Y
    scaled = lambda x: x * w
    y = remat(lambda x: scaled(x).sin() * scaled(x))(x)
    w = 5 * Y
    return y.sum()


def cells_of_a_method_that_knows_itself(remat, x):
    """As the methods of layers of transformers, which ask whether they are what the class has."""
    w = Y

    def forward(self, x):
        return (x * w).sin() if type(self).forward is forward else x.cos()

    Layer = type("Layer", (), {"forward": forward})
    y = remat(Layer().forward)(x) + remat(functools.partial(Layer.forward, Layer()))(x)
    w = 5 * Y
    return y.sum()


def containers_among_the_arguments(remat, x):
    def f(tensors, named, *, last):
        x = tensors[0] * named["w"]["y"] * tensors[1]
        return (x * last[0]).sin() * x

    tensors, named, last = [x, 3.0], {"w": {"y": Y}}, [2.0]
    y = remat(f)(tensors, named, last=last)
    tensors.clear()
    named["w"]["y"], last[0] = 5 * Y, 7.0
    return y.sum()


def an_attribute(remat, x):
    holder = Holder()
    y = remat(lambda x: holder(x) * x)(x)
    holder.w = 5 * Y
    return y.sum()


class Net(nn.Module):
    """Two layers; ``remat`` goes around the second, or the whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", Y.clone())
        self.double()

    def tail(self, x):
        return torch.sin(self.second(x) * self.scale)

    def forward(self, x, remat):
        return remat(self.tail)(torch.sin(self.first(x)))


CHANGED = [
    cells,
    cells_of_a_function_that_the_region_calls,
    cells_of_a_method_that_knows_itself,
    containers_among_the_arguments,
    an_attribute,
]


@pytest.mark.parametrize("loss", CHANGED, ids=lambda f: f.__name__)
@every_stack
def test_what_is_bound_again_after_the_call(loss, stack):
    check(lambda remat: STACKS[stack](lambda x: loss(remat, x), X))


@every_stack
@judged_by(check)
def test_parameters_and_buffers_replaced_after_the_call(remat, stack):
    net = Net()

    def loss(x):
        y = net(x, remat)
        net.second.weight, net.scale = nn.Parameter(numbers(3, 3)), 5 * Y
        return y.sum()

    return STACKS[stack](loss, X)


@every_stack
def test_requires_grad_says_what_it_says_without_remat(stack):
    def f(x, c):
        x = x.sin() * x if x.requires_grad else x.cos().exp()
        return x * (c.exp() if c.requires_grad else c)

    check(lambda remat: STACKS[stack](lambda x: remat(f)(x, Y).sum(), X))


@every_stack
def test_a_constant_argument_also_reached_by_an_attribute_that_is_rebound(stack, speed):
    holder = Holder()

    def loss(remat, x):
        holder.w = Y
        y = remat(lambda x, w: holder(x) * (w + x))(x, holder.w)
        holder.w = 5 * Y
        return y.sum()

    program = lambda remat: STACKS[stack](lambda x: loss(remat, x), X)
    speed.prepare(lambda: right_or_raises(program))
    with speed:
        right_or_raises(program)


@pytest.mark.parametrize(
    ("around", "stack"),
    [
        ("inside", "grad"),
        ("whole", "vmap(grad)"),
        ("functional_call", "backward"),
        ("inside", "backward(vmap)"),
        ("functional_call", "vmap(grad)"),
        ("whole", "backward"),
    ],
)
@judged_by(check)
def test_parameters_that_functional_call_had_swapped_in(remat, stack, around):
    """The pullback runs when the module has its own parameters again."""

    net = Net()

    def call(tree, x):
        inner = remat if around != "whole" else identity
        return functx.functional_call(net, tree, (x, inner)).square().sum()

    loss = call if around == "inside" else remat(call)
    x = numbers(4, 3) if "vmap" in stack else X
    tree = {name: t.detach() * 0.5 for name, t in net.state_dict().items()}
    if "backward" in stack:
        tree = {name: t.requires_grad_() for name, t in tree.items()}
    f = functx.grad(loss) if "grad" in stack else loss
    found = (functx.vmap(f, (None, 0)) if "vmap" in stack else f)(tree, x)
    if "backward" in stack:
        found = torch.autograd.grad(found.sum(), list(tree.values()))
    assert all(p.grad is None for p in net.parameters())
    return found


def test_the_comparison_can_fail():
    def program(remat):
        holder, x = Holder(), X.clone().requires_grad_()
        y = remat(lambda x: holder(x) * x)(x)
        holder.w = 5 * Y
        return torch.autograd.grad(y.sum(), x)

    with pytest.raises(AssertionError):
        same(program(naive), program(identity))


all_stacks = pytest.mark.parametrize("stack", STACKS)
DATA = {
    "tensor of a number": lambda a: (a * torch.tensor(random.random())).sin(),
    "as_tensor of an array": lambda a: (a * torch.as_tensor(np.random.rand(3))).sin(),
    "from_numpy": lambda a: (a * torch.from_numpy(np.random.rand(3))).sin(),
    "a permutation": lambda a: a.exp()[torch.as_tensor(np.random.permutation(3))].sin() * Y,
    "a mask": lambda a: torch.where(torch.tensor(np.random.rand(3) < 0.5), a.exp(), a.sin()),
    "computed from before it is used": lambda a: (
        a * (torch.tensor(random.random()).exp() + torch.from_numpy(np.random.rand(3)).sin())
    ).sin(),
    "used twice": lambda a: (lambda t: (a * t).sin() * t)(torch.tensor(random.random())),
}


@pytest.mark.parametrize(
    ("name", "stack"),
    [(n, s) for i, n in enumerate(DATA) for j, s in enumerate(STACKS) if (i + j) % 4 == 0],
)
@judged_by(check)
def test_data_is_not_made_again(remat, name, stack):
    region = remat(DATA[name])
    return STACKS[stack](lambda x: (region(region(x)) * Y).sum(), X)


@pytest.mark.parametrize("stack", ["backward", "double backward", "grad", "jvp(grad)"])
def test_data_may_be_written_to(stack):
    def f(x):
        total = torch.tensor([random.random(), 0.0, 0.0], dtype=x.dtype)
        total[1:] = x[1:]
        total += x.sin()
        return (total * x).sum()

    check(lambda remat: STACKS[stack](remat(f), X))


def test_an_array_that_changes_after_torch_has_copied_it_changes_nothing():
    array = np.ones(3)
    x = X.clone().requires_grad_()
    y = functx.remat(lambda x: (x.sin() * torch.tensor(array)).sin())(x)
    array[:] = 7
    same(torch.autograd.grad(y.sum(), x)[0], functx.grad(lambda x: x.sin().sin().sum())(X))


class Rope(nn.Module):
    """A table that the first call fills, as many models have it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.tables, self.table = kind, {}, None

    def forward(self, x):
        if self.kind == "a dict" and len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x), dtype=x.dtype).exp().cos()
        if self.kind == "an attribute" and self.table is None:
            self.table = torch.arange(len(x), dtype=x.dtype).exp().cos()
        table = self.tables[len(x)] if self.kind == "a dict" else self.table
        return (x.sin() * table).sin()


@pytest.mark.parametrize(
    ("kind", "stack"), [("a dict", "backward"), ("an attribute", "grad"), ("a dict", "vjp")]
)
class TestLazilyFilledCaches:
    def program(self, stack, kind, regions, called_before=False):
        def program(remat):
            rope = Rope(kind)
            if called_before:
                rope(X)

            def loss(x):
                for _ in range(regions):
                    x = remat(rope)(x)
                return x.sum()

            return STACKS[stack](loss, X)

        return program

    @pytest.mark.parametrize("regions", [1, 3])
    def test_are_right_or_a_departure_says_what_they_are(self, stack, kind, regions):
        right_or_raises(self.program(stack, kind, regions), "made at the first call and kept")

    def test_are_right_where_they_were_filled_before(self, stack, kind):
        check(self.program(stack, kind, 3, called_before=True))


class TestCapturesByPlace:
    @all_stacks
    @judged_by(check)
    def test_another_captured_tensor_in_the_same_place(self, remat, stack):
        def loss(x):
            ws = [Y, 5 * Y]
            y = remat(lambda x: (x * ws[0]).sin() * x)(x)
            ws.reverse()
            return y.sum()

        return STACKS[stack](loss, X)

    def test_two_that_trade_places_are_right_or_an_error(self, speed):
        both = [numbers(3, start=i).requires_grad_() for i in (1.0, 2.0)]
        held = Holder()

        def program(remat):
            held.v, held.w = both
            y = remat(lambda x: (x * held.v).sin() * (x * held.w).exp() * held.v)(X)
            held.w, held.v = both
            return torch.autograd.grad(y.sum(), both)

        speed.prepare(lambda: right_or_raises(program))
        with speed:
            right_or_raises(program)


HELD = {}
"""A global, for one of the ways."""


def way(f):
    """From a way to hold ``w``: ``f(w)`` is what a region is made of."""
    return lambda remat, w: remat(f(w))


def in_a_global(remat, w):
    HELD["w"] = w
    return remat(lambda x: (x * HELD["w"]).sin() * HELD["w"])


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
@judged_by(check)
def test_below_a_transform_of_another_tensor(remat, name):
    w = Y.clone().requires_grad_()
    f = WAYS[name](remat, torch.cat([w[:1], w]) if name == "a part of it" else w)
    gradient = functx.grad(squared(f))(X)
    each = functx.vmap(functx.grad(squared(f)))(batch(X))
    return gradient, each, torch.autograd.grad(gradient.sum() + each.square().sum(), w)


@pytest.mark.parametrize(
    ("stack", "depth"), [("vmap(grad)", 2), ("grad(grad)", 3), ("backward", 2)]
)
@judged_by(check)
def test_of_regions_that_capture_what_an_ended_level_made(remat, stack, depth):
    def loss(w):
        step = lambda x: x - w * functx.grad(lambda x: torch.sin(x * w).sum())(x)
        for _ in range(depth):
            step = remat(lambda x, inner=step: inner(x * w))
        return step(X).sum()

    return STACKS[stack](loss, Y)
