"""Second derivatives run no operation that a compiler would leave out of the same pullbacks."""

import random
import sys

import house
import pytest
import torch
from cases import numbers
from references import count
from torch.fx.experimental.proxy_tensor import make_fx

import functx

sys.path.insert(0, str(house.ROOT))

from bench.counts import programs

pytestmark = pytest.mark.usefixtures("hooks")

X = numbers(4)
PROGRAMS = programs(torch.sin, functx.remat)


def live_nodes(f, *args):
    """Operations left of a traced program when dead code is gone, by name."""
    graph = make_fx(f)(*args)
    graph.graph.eliminate_dead_code()
    names = [
        node.target.overloadpacket.__name__
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize("name", ["remat(sin, sin)", "eight regions of one", "binomial, 4"])
def test_second_order_runs_no_more_than_a_compiler_would_leave(name):
    _, _, f = PROGRAMS[name]

    def second(x):
        return functx.grad(lambda x: functx.grad(lambda x: f(x).sum())(x).sum())(x)

    left, ran = live_nodes(second, X), count(second, X)
    for operation in ("sin", "cos"):
        assert ran[operation] <= left[operation]


def random_program(choose, depth):
    """A function of functions of one number each, one after another, multiplied, in regions."""
    kind = choose.random()
    if depth == 0 or kind < 0.25:
        return getattr(torch, choose.choice(FUNCTIONS))
    if kind >= 0.7:
        return functx.remat(random_program(choose, depth - 1))
    f, g = (random_program(choose, depth - 1) for _ in range(2))
    return (lambda x: g(f(x))) if kind < 0.55 else (lambda x: f(x) * g(x))


FUNCTIONS = ("sin", "cos", "exp", "tanh")


@pytest.mark.parametrize("seed", range(12))
def test_second_order_of_random_programs(seed):
    """As above: no function is computed that a compiler would leave out."""
    f = functx.remat(random_program(random.Random(seed), 4))

    def second(x):
        return functx.grad(lambda x: functx.grad(lambda x: f(x).sum())(x).sum())(x)

    left, ran = live_nodes(second, X), count(second, X)
    assert all(ran[operation] <= left.get(operation, 0) for operation in FUNCTIONS)
