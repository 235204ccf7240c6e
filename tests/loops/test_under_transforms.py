"""A loop is the plain loop under every transform, and as JAX has it."""

import itertools

import pytest
import torch
from cases import DTYPE, apply, numbers
from references import assert_same, total

import functx

from . import plain

pytestmark = pytest.mark.usefixtures("no_hooks")

ROUNDINGS = 64.0
STACKS = [
    *[(name,) for name in ("grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "vmap")],
    *itertools.permutations(("grad", "vmap", "jvp"), 2),
    *[("grad", "grad"), ("jacrev", "jacfwd"), ("vmap", "jacrev"), ("grad", "vmap", "grad")],
    *[("vmap", "grad", "vmap"), ("jvp", "grad", "vmap")],
]
OPTIONS = [{"slots": 3, "reverse": True}, {}]


def found(f, stack, x, library=functx):
    """Values of a stack of transforms around ``f``, and the gradient of their sum."""
    for name in reversed(stack):
        f = apply(library, name, f)
    x = x.clone().requires_grad_()
    out = f(x)
    return out, torch.autograd.grad(total(out), x, allow_unused=True, materialize_grads=True)


def argument(stack):
    return numbers(*(2,) * stack.count("vmap"), 2)


def check_scan(stack, options):
    """A recurrent network over a sequence that depends on ``x``, its weights as well."""

    def recurrence(scan):
        def f(x):
            weight, xs = x[:, None] * numbers(2, 2), numbers(7, 2) * x

            def body(carry, piece):
                new = torch.tanh(carry @ weight + piece)
                return new, new * piece

            return scan(body, x, xs, **options)

        return found(f, stack, argument(stack))

    assert_same(recurrence(functx.remat_scan), recurrence(plain.scan), eps=ROUNDINGS)


@pytest.mark.parametrize(
    ("stack", "options"), [(s, OPTIONS[i % 2]) for i, s in enumerate(STACKS)], ids=str
)
def test_a_scan_is_the_plain_scan(stack, options):
    check_scan(stack, options)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [*OPTIONS, {"slots": 1}], ids=str)
@pytest.mark.parametrize("stack", STACKS, ids="(".join)
def test_every_scan_is_the_plain_scan(stack, options):
    check_scan(stack, options)


@pytest.mark.parametrize("stack", STACKS, ids="(".join)
def test_a_loop_until_a_condition_is_the_plain_loop(stack):
    def run(loop):
        def f(x):
            weight = x[:, None] * numbers(2, 2)
            first = (torch.zeros((), dtype=DTYPE), x)

            def body(state):
                return state[0] + 1, torch.tanh(state[1] @ weight + x)

            return loop(body, first, lambda state: state[0] < 6)[1]

        return found(f, stack, argument(stack))

    assert_same(run(functx.remat_loop), run(plain.while_it_holds), eps=ROUNDINGS)


@pytest.mark.parametrize(
    "stack", [("vmap",), ("vmap", "grad"), ("grad", "vmap"), ("vmap", "hessian")], ids="(".join
)
def test_examples_may_end_at_different_steps(stack):
    def masked(body, state, cond):
        for _ in range(12):
            state = torch.where(cond(state), body(state), state)
        return state

    def run(loop):
        def f(x):
            return loop(lambda y: y * (1.5 + x * x), x, lambda y: y.abs() < 9)

        return found(f, stack, numbers(5) + 1.3)

    assert_same(run(functx.remat_loop), run(masked), eps=ROUNDINGS)


@pytest.mark.parametrize(("reverse", "slots"), [(False, 1), (True, 2), (False, 8)])
def test_a_scan_is_that_of_jax(reverse, slots):
    jax = pytest.importorskip("jax")

    def body(where):
        def step(carry, x):
            new = where.sin(carry * x["a"]) + x["b"]
            return new, (new * carry, x["a"])

        return step

    arrays = {"a": numbers(6, 3).float(), "b": numbers(6, start=1.0).float()}
    theirs_xs = {k: jax.numpy.asarray(v.numpy()) for k, v in arrays.items()}

    def ours(c):
        return functx.remat_scan(body(torch), c, arrays, reverse=reverse, slots=slots)

    def theirs(c):
        return jax.lax.scan(body(jax.numpy), c, theirs_xs, reverse=reverse)

    c = numbers(3).float()
    d = jax.numpy.asarray(c.numpy())
    for a, b in [(ours(c), theirs(d)), (functx.jacrev(ours)(c), jax.jacrev(theirs)(d))]:
        mine, other = torch.utils._pytree.tree_leaves(a), jax.tree.leaves(b)
        for x, y in zip(mine, other, strict=True):
            torch.testing.assert_close(x, torch.tensor(y.tolist()), rtol=1e-5, atol=1e-5)
