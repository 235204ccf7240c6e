"""remat(f) is f in every stack of transforms: values and derivatives, remat at every position.

The stacks are all of {vmap, grad, jvp, jacrev, jacfwd, vjp} to depth 2, and all of
{vmap, grad, jvp} of depth 3. ``remat`` goes around the base function, between any two transforms,
around the whole stack, and in all of these places at once. The reference is the same stack without
it. Each run is followed by plain autograd through what comes out.
"""

import itertools
from functools import cache

import pytest
import torch
from cases import BASES, apply, argument, numbers
from programs import identity
from references import assert_same, total
from torch.utils import _pytree as pytree

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

SIX = ("vmap", "grad", "jvp", "jacrev", "jacfwd", "vjp")
THREE = ("vmap", "grad", "jvp")
STACKS = [
    *itertools.product(SIX, repeat=1),
    *itertools.product(SIX, repeat=2),
    *itertools.product(THREE, repeat=3),
]
LIBRARIES = {"functx": functx, "torch.func": torch.func}

# In roundings of the largest number of a tensor: where a value is used more than twice, its
# gradients may be added up in another order.
ROUNDINGS = 8


def run(library, base, stack, places, remat):
    """Values, and the gradients of their sum, of a stack given innermost first.

    Args:
        library: ``functx`` or ``torch.func``.
        base: Name of a base function.
        stack: Names of transforms.
        places: Where ``remat`` goes: 0 around the base function, ``i`` around the first ``i``
            transforms of the stack and the base function.
        remat: What goes there.

    Returns:
        A pytree of values and one of gradients.
    """
    case = BASES[base]

    def f(x):
        return case.function(x, remat if 0 in places else identity)

    if 0 in places:
        f = remat(f)
    for place, name in enumerate(stack, start=1):
        f = apply(library, name, f)
        if place in places:
            f = remat(f)
    x = argument(case, stack.count("vmap"))
    leaves, spec = pytree.tree_flatten(x)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    values = f(pytree.tree_unflatten(leaves, spec))
    gradients = torch.autograd.grad(
        total(values), leaves, allow_unused=True, materialize_grads=True
    )
    return values, gradients


@cache
def reference(library, base, stack):
    return run(LIBRARIES[library], base, stack, (), identity)


def positions(depth):
    singles = [(place,) for place in range(depth + 1)]
    return singles + ([tuple(range(depth + 1))] if depth else [])


CASES = [(stack, places) for stack in STACKS for places in positions(len(stack))]


def name_case(case):
    stack, places = case
    return "(".join(reversed(stack)) + "@" + "".join(map(str, places))


def check(library, base, stack, places):
    values, gradients = run(LIBRARIES[library], base, stack, places, functx.remat)
    expected_values, expected_gradients = reference(library, base, stack)
    # A vjp returns the output and the cotangent, so a derivative of it sums up two gradients.
    single = BASES[base].single and "vjp" not in stack[:-1]
    forward_only = not {"grad", "jacrev", "vjp"} & set(stack)
    assert_same(values, expected_values, eps=0 if single or forward_only else ROUNDINGS)
    assert_same(gradients, expected_gradients, eps=0 if single and not stack else ROUNDINGS)


@pytest.mark.parametrize("case", CASES, ids=name_case)
@pytest.mark.parametrize("base", ["chain", "mlp"])
def test_functx(base, case):
    check("functx", base, *case)


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_torch_func(case):
    """torch's own transforms around a functx region."""
    check("torch.func", "chain", *case)


@pytest.mark.parametrize("case", [c for c in CASES if len(c[0]) < 3], ids=name_case)
@pytest.mark.parametrize("base", ["closure", "attention"])
def test_other_functions(base, case):
    check("functx", base, *case)


@pytest.mark.parametrize("base", BASES)
def test_plain_autograd(base):
    check("functx", base, (), (0,))


@pytest.mark.parametrize(("outer", "inner"), list(itertools.product(SIX, SIX)))
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_region_inside_both_levels_closes_over_the_outer(library, outer, inner):
    """``outer(lambda x: inner(remat(lambda y: ... x ...)))``: x is foreign to the region."""

    def build(remat):
        def middle(x):
            scale = x.exp()
            f = apply(LIBRARIES[library], inner, remat(lambda y: torch.sin(y * scale[..., :3])))
            return f(numbers(2, 3) if inner == "vmap" else x.detach() * 0.5 + 0.1)

        return apply(LIBRARIES[library], outer, middle)

    x = numbers(2, 3) if outer == "vmap" else numbers(3)
    leaf = x.requires_grad_()
    expected, actual = build(identity)(leaf), build(functx.remat)(leaf)
    assert_same(actual, expected, eps=ROUNDINGS)
    assert_same(
        torch.autograd.grad(total(actual), leaf),
        torch.autograd.grad(total(expected), leaf),
        eps=ROUNDINGS,
    )


def test_the_comparison_can_fail():
    """A remat that loses a derivative, or is off by little, does not pass."""

    def detached(f):
        return lambda x: f(x.detach()) + 0 * x.sum()

    def inexact(f):
        return lambda x: pytree.tree_map(lambda leaf: leaf * (1 + 1e-14), f(x))

    expected = reference("functx", "chain", ("jvp",))
    for broken in (detached, inexact):
        values, gradients = run(functx, "chain", ("jvp",), (0,), broken)
        with pytest.raises(AssertionError):
            assert_same((values, gradients), expected, eps=ROUNDINGS)
