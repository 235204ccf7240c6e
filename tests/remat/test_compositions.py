"""``remat(f)`` is ``f`` in every stack of transforms, at every position, to depth three.

The reference is the same stack without remat, in float64. What comes out is differentiated once
more, by plain autograd. The normal suite takes all pairs of transforms, positions and functions; a
sweep takes the whole grid of 399 stacks, which are of up to sixth order.
"""

import itertools
from functools import cache

import pytest
import torch
from cases import apply
from references import assert_same, total

import functx

from .programs import by_backward, identity, numbers, same

TRANSFORMS = ("vmap", "grad", "jvp", "vjp", "jacrev", "jacfwd", "hessian")
ORDER = {"vmap": 0, "hessian": 2}  # the others differentiate once
W = numbers(2, 2, start=0.4)


@pytest.fixture(autouse=True)
def _memory_that_nobody_wrote_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def layer(x, remat):
    return torch.tanh(x @ W)


def closure(x, remat):
    outer = torch.exp(x)  # a tensor of every level around
    return remat(lambda y: torch.sin(y * outer))(x)


def tree(x, remat):
    inner = remat(lambda xs, by: {"a": xs[0].sin() * by, "b": [xs[1].exp()]})
    out = inner((x, x[..., :1]), by=0.5)
    return out["a"] * out["b"][0]


FUNCTIONS = {"layer": layer, "closure": closure, "tree": tree}


def run(name, stack, places, remat):
    """Values of a stack, given innermost first, and the gradient of their sum.

    ``places`` says where ``remat`` goes: 0 around the function, i around the first i transforms.
    """
    f = lambda x: FUNCTIONS[name](x, remat if places else identity)
    f = remat(f) if 0 in places else f
    for place, transform in enumerate(stack, start=1):
        f = apply(functx, transform, f)
        f = remat(f) if place in places else f
    x = numbers(*(2,) * (1 + stack.count("vmap"))).requires_grad_()
    out = f(x)
    return out, torch.autograd.grad(total(out), x, allow_unused=True, materialize_grads=True)


@cache
def reference(name, stack):
    return run(name, stack, (), identity)


def positions(depth):
    return [*((place,) for place in range(depth + 1)), tuple(range(depth + 1))]


STACKS = [s for depth in (1, 2, 3) for s in itertools.product(TRANSFORMS, repeat=depth)]


def pairwise():
    """All stacks of one and two. Of three, those of up to third order from an orthogonal array of
    49, of which any two of transforms, position and function take all pairs of values."""
    chosen = set()
    for a, b in itertools.product(range(7), repeat=2):
        for numbers_of in ((a,), (a, b), (a, b, (a + b) % 7)):
            stack = tuple(TRANSFORMS[i] for i in numbers_of)
            names = list(FUNCTIONS)[: 2 if len(stack) == 3 else 3]
            places = positions(len(stack))
            if len(stack) < 3 or sum(ORDER.get(name, 1) for name in stack) <= 3:
                name = names[(a + 3 * b) % 7 % len(names)]
                chosen.add((name, stack, places[(a + 2 * b) % 7 % len(places)]))
    return chosen


def title(case):
    name, stack, places = case
    return f"{'('.join(reversed(stack))} of {name} at {''.join(map(str, places))}"


@pytest.mark.parametrize("case", sorted(pairwise()), ids=title)
def test_values_and_gradients(case):
    same(run(*case, functx.remat), reference(*case[:2]))


@pytest.mark.sweep
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("stack", STACKS, ids="(".join)
def test_the_whole_grid(stack, name):
    for places in positions(len(stack)):
        same(run(name, stack, places, functx.remat), reference(name, stack))


@pytest.mark.parametrize("places", positions(0))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_plain_autograd(name, places):
    same(run(name, (), places, functx.remat), reference(name, ()))


def nested(depth, remat):
    """``sin`` of ``x * 1.1`` again and again, one region in another."""

    f = lambda x: (x * 1.1).sin()
    for _ in range(depth):
        f = remat(lambda x, inner=f: inner((x * 1.1).sin()))
    return f


def fifty_in_each_other_at_the_base_level(remat):
    return by_backward(lambda x: nested(50, remat)(x).sum(), numbers(4))


def twenty_under_three_transforms(remat):
    gradient = functx.grad(lambda x: nested(20, remat)(x).sum())
    return functx.vmap(functx.vmap(gradient))(numbers(2, 2, 4))


def a_hundred_in_a_row(remat):
    x = y = numbers(4).requires_grad_()
    for _ in range(100):
        y = remat(lambda y: (y * 1.1).sin())(y)
    return torch.autograd.grad(y.sum(), x)


MANY = [
    fifty_in_each_other_at_the_base_level,
    twenty_under_three_transforms,
    a_hundred_in_a_row,
]


@pytest.mark.parametrize("program", MANY, ids=lambda f: f.__name__)
def test_many_regions(program):
    assert_same(program(functx.remat), program(identity), eps=64)
