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




W = numbers(4, 4)
FORWARD_MODE = {
    "linear": (lambda x: x @ W, "mm", 0),
    "two results": (lambda x: (lambda y: (y, y + y))(x @ W), "mm", 0),
    "a result that its own derivative reads": (torch.tanh, "tanh", 1),
    "the last of a chain": (lambda x: torch.tanh(torch.tanh(x)), "tanh", 2),
    "a region inside": (functx.remat(lambda x: (x @ W) @ W), "mm", 0),
}
"""Functions, an operation, and how often a backward pass computes its value again."""




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
