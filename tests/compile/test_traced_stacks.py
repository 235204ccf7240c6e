"""Traced graphs of stacks of transforms over regions: values and products, also with symbols."""

import collections
import itertools
import random

import pytest
import torch
from cases import numbers
from references import assert_same
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import functx

WEIGHT = numbers(4, 4, start=1.0)


def linear(x, weight):
    return torch.tanh(F.linear(x, weight, weight[1]))


def folded(x, weight):
    return (x.reshape(-1, 4) @ weight.mT).view(x.shape).sin() + x


def reduced(x, weight):
    y = x @ weight
    return y / (1 + y.square().sum(-1, keepdim=True)) + y.mean(0)


def in_place(x, weight):
    y = x.clone()
    y.mul_(weight[0]).add_(x @ weight)
    return y.exp_().reciprocal()


PROGRAMS = [linear, folded, reduced, in_place]
NAMES = ("grad", "vmap", "jvp")
STACKS = [s for n in (1, 2, 3) for s in itertools.product(NAMES, repeat=n) if s.count("jvp") < 2]


def transformed(library, name, f):
    if name == "grad":
        return library.grad(lambda x: f(x).square().sum())
    if name == "vmap":
        return library.vmap(f)
    return lambda x: library.jvp(f, (x,), (x * 0.5 + 1,))[1]


def stacked(f, stack, region, library=functx):
    """The gradients of a stack of transforms around a region, by the input and by a weight."""

    def loss(x, weight):
        g = lambda x: region(f)(x, weight)
        for name in reversed(stack):
            g = transformed(library, name, g)
        return g(x).square().sum()

    return library.grad(loss, (0, 1))


def none(f):
    return f


def argument(stack, rows=3):
    return numbers(*(2,) * stack.count("vmap"), rows, 4)


def check(f, stack, region, plain, mode):
    """The graph is right, or torch can't trace the same, or run it, without regions, either."""
    x = argument(stack)
    expected = stacked(plain, stack, none, torch.func)(x, WEIGHT)
    try:
        found = make_fx(stacked(f, stack, region), tracing_mode=mode)(x, WEIGHT)(x, WEIGHT)
    except Exception:
        g = stacked(plain, stack, none, torch.func)
        try:
            make_fx(g, tracing_mode=mode)(x, WEIGHT)(x, WEIGHT)
        except Exception:
            return
        raise
    assert_same(found, expected, eps=2.0**16)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "stack",
    [
        pytest.param(s, marks=pytest.mark.sweep if len(s) > 2 and i % 3 else ())
        for i, s in enumerate(STACKS)
    ],
    ids="(".join,
)
def test_a_traced_stack_is_what_it_is_in_eager(stack, f, mode):
    check(f, stack, functx.remat, f, mode)


def products(graph):
    graph.graph.eliminate_dead_code()  # (the tracer leaves what only its sizes were asked of)
    return collections.Counter(n.target for n in graph.graph.nodes)[torch.ops.aten.mm.default]


@pytest.mark.parametrize("stack", [("grad",), ("vmap", "grad"), ("vmap",)], ids="(".join)
@pytest.mark.parametrize("f", [linear, folded], ids=lambda f: f.__name__)
def test_a_graph_with_symbols_has_the_products_of_one_without(f, stack):
    region, args = stacked(f, stack, functx.remat), (argument(stack), WEIGHT)
    modes = ("real", "fake", "symbolic")
    counts = [products(make_fx(region, tracing_mode=mode)(*args)) for mode in modes]
    assert len({*counts}) == 1, counts


@pytest.mark.parametrize("stack", [("grad",), ("vmap", "grad")], ids="(".join)
@pytest.mark.parametrize("f", [linear, folded], ids=lambda f: f.__name__)
def test_a_graph_with_symbols_is_right_at_other_sizes(f, stack):
    region, x = stacked(f, stack, functx.remat), argument(stack, rows=7)
    graph = make_fx(region, tracing_mode="symbolic")(argument(stack), WEIGHT)
    assert_same(graph(x, WEIGHT), stacked(f, stack, none, torch.func)(x, WEIGHT), eps=256)


STEPS = [
    lambda x, w: x @ w,
    lambda x, w: F.linear(x, w),
    lambda x, w: x.sin() * w[0],
    lambda x, w: x - x.mean(-1, keepdim=True),
    lambda x, w: x.reshape(-1).view(x.shape).exp().reciprocal(),
    lambda x, w: x.mT.contiguous().mT.tanh(),
    lambda x, w: x.clone().mul_(0.5).add_(w[1]),
    lambda x, w: torch.cat([x[..., 2:], x[..., :2]], -1) + x.flip(-1),
    lambda x, w: F.softmax(x, -1) * x,
    lambda x, w: x * x.sum(0),
]


def random_program(seed):
    """Some steps, a region of some of them, perhaps one inside of it; and a stack."""
    draw = random.Random(seed)
    parts = [draw.choices(STEPS, k=draw.randint(1, 3)) for _ in range(3)]
    nested, stack = draw.random() < 0.5, draw.choice(STACKS)

    def run(steps, x, w):
        for step in steps:
            x = step(x, w)
        return x

    def program(region):
        def inner(x, w):
            return run(parts[1], x, w)

        def outer(x, w):
            return (region(inner) if nested else inner)(run(parts[0], x, w), w)

        return lambda x, w: torch.tanh(run(parts[2], region(outer)(x, w), w))

    return program, stack


@pytest.mark.parametrize(
    "seeds",
    [range(8), pytest.param(range(8, 340), marks=pytest.mark.sweep)],
    ids=["few", "many"],
)
def test_random_programs_traced_in_three_modes(seeds):
    for seed in seeds:
        program, stack = random_program(seed)
        for mode in ("real", "fake", "symbolic"):
            try:
                check(program(functx.remat), stack, none, program(none), mode)
            except Exception as error:
                error.add_note(f"program {seed}, {stack}, traced with {mode} tensors")
                raise
