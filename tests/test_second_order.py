"""Second derivatives run no operation that a compiler would leave out of the same pullbacks."""

import random
import sys

import house
import pytest
import torch
from cases import numbers
from programs import identity
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
        if node.op == "call_function" and hasattr(node.target, "overloadpacket")
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


W = numbers(4, 4)
FORWARD_MODE = {
    "linear": (lambda x: x @ W, "mm", 0),
    "two results": (lambda x: (lambda y: (y, y + y))(x @ W), "mm", 0),
    "a result that its own derivative reads": (torch.tanh, "tanh", 1),
    "the last of a chain": (lambda x: torch.tanh(torch.tanh(x)), "tanh", 2),
    "a region inside": (functx.remat(lambda x: (x @ W) @ W), "mm", 0),
}
"""Functions, an operation, and how often a backward pass computes its value again."""


@pytest.mark.parametrize("name", FORWARD_MODE)
@pytest.mark.parametrize("forward_first", [True, False])
def test_a_result_that_holds_a_tangent_is_not_computed_for_it(name, forward_first):
    """Tangents are held by their primals, not by a tape; but who holds a dual holds its tangent."""
    f, operation, again = FORWARD_MODE[name]

    def second(remat):
        def loss(x):
            outs = remat(f)(x)
            return (outs[1] if isinstance(outs, tuple) else outs).sin().sum()

        if forward_first:
            return functx.grad(lambda x: functx.jvp(loss, (x,), (W,))[1])
        return lambda x: functx.jvp(functx.grad(loss), (x,), (W,))

    x = numbers(4, 4)
    torch.testing.assert_close(second(functx.remat)(x), second(identity)(x))
    ours, plain = count(second(functx.remat), x), count(second(identity), x)
    assert ours[operation] - plain[operation] == again


def newton(steps):
    """The minimum of a function, by its Hessian: forward over reverse, differentiated again."""

    def f(x, t):
        return ((x - t).pow(2) + x.cos()).sum()

    def solve(t):
        x = torch.zeros_like(t)
        for _ in range(steps):
            x = x - torch.linalg.solve(functx.hessian(f)(x, t), functx.grad(f)(x, t))
        return x

    return solve


@pytest.mark.parametrize("jacobian", [functx.jacrev, functx.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_newton_steps_in_a_region(jacobian, requires_grad):
    """Forward mode has zeros without memory, which are on the tape when it has ended."""
    t = numbers(4).requires_grad_(requires_grad)
    found = jacobian(functx.remat(newton(3)))(t)
    torch.testing.assert_close(found, jacobian(newton(3))(t), rtol=1e-10, atol=1e-12)
