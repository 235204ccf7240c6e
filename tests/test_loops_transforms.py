"""A loop is the plain loop: under every transform, with closures, random numbers, any pytree."""

import itertools

import pytest
import torch
from cases import DTYPE, apply, numbers
from references import assert_same, total
from torch import nn
from torch.nn import functional as F

import functx

pytestmark = pytest.mark.usefixtures("no_hooks")

ROUNDINGS = 64.0
STACKS = [
    *[(name,) for name in ("grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "vmap")],
    *itertools.permutations(("grad", "vmap", "jvp"), 2),
    ("grad", "grad"),
    ("jacrev", "jacfwd"),
    ("vmap", "jacrev"),
    ("grad", "vmap", "grad"),
    ("vmap", "grad", "vmap"),
    ("jvp", "grad", "vmap"),
]


def plain_scan(body, carry, xs=None, length=None, reverse=False, **_):
    """The loop that it stands for."""
    steps = range(len(xs)) if length is None else range(length)
    ys = {}
    for i in reversed(steps) if reverse else steps:
        carry, ys[i] = body(carry, None if xs is None else xs[i])
    return carry, None if ys[0] is None else torch.stack([ys[i] for i in steps])


def plain_loop(body, state, steps, **_):
    for _ in range(steps):
        state = body(state)
    return state


def recurrence(x, scan, **options):
    """A recurrent network over a sequence that depends on ``x``, its weights as well."""
    weight = x[:, None] * numbers(2, 2)  # closed over, at every level of the transforms
    xs = numbers(7, 2) * x

    def body(carry, piece):
        new = torch.tanh(carry @ weight + piece)
        return new, new * piece

    return scan(body, x, xs, **options)


def number_of(stack):
    return stack.count("vmap")


@pytest.mark.parametrize("stack", STACKS, ids="(".join)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"slots": 1}, marks=pytest.mark.sweep),  # the longest by far: most recomputing
        {"slots": 3, "reverse": True},
        {},
    ],
    ids=str,
)
def test_scan_under_transforms(stack, options):
    def run(scan):
        f = lambda x: recurrence(x, scan, **options)  # noqa: E731
        for name in reversed(stack):
            f = apply(functx, name, f)
        x = numbers(*(2,) * number_of(stack), 2).requires_grad_()
        out = f(x)
        return out, torch.autograd.grad(total(out), x, allow_unused=True, materialize_grads=True)

    assert_same(run(functx.remat_scan), run(plain_scan), eps=ROUNDINGS)


@pytest.mark.parametrize(
    "stack", [("grad",), ("vmap", "grad"), ("hessian",), ("jvp",)], ids="(".join
)
def test_loop_under_transforms_of_torch(stack):
    def run(loop):
        f = lambda x: loop(lambda y: torch.sin(y * x), x, 9, slots=2)  # noqa: E731
        for name in reversed(stack):
            f = apply(torch.func, name, f)
        return f(numbers(*(2,) * number_of(stack), 2))

    assert_same(run(functx.remat_loop), run(plain_loop), eps=ROUNDINGS)


def backward(f, module, x):
    x = x.detach().requires_grad_()
    out = f(module, x)
    return out, torch.autograd.grad(total(out), [x, *module.parameters()])


class TestBodies:
    def test_module(self):
        def f(loop):
            return lambda module, x: loop(module, x, 11, slots=2)

        module = nn.Sequential(nn.Linear(3, 3, dtype=DTYPE), nn.Tanh())
        ours = backward(f(functx.remat_loop), module, numbers(4, 3))
        assert_same(ours, backward(f(plain_loop), module, numbers(4, 3)), eps=ROUNDINGS)

    def test_recurrent_cell(self):
        def f(scan):
            def run(cell, xs):
                def body(carry, x):
                    new = cell(x, carry)
                    return new, new[0]

                return scan(body, (numbers(2, 3), numbers(2, 3, start=1.0)), xs)

            return run

        def flat(scan):
            def g(*args):
                carry, ys = scan(*args)
                return carry, ys

            return f(g)

        cell, xs = nn.LSTMCell(4, 3, dtype=DTYPE), numbers(9, 2, 4)
        ours = backward(flat(functx.remat_scan), cell, xs)
        assert_same(ours, backward(flat(plain_scan), cell, xs), eps=ROUNDINGS)

    @pytest.mark.parametrize("source", ["default", "generator", "keyword"])
    def test_random_numbers_are_replayed(self, source):
        def f(loop):
            torch.manual_seed(3)
            generator = torch.Generator().manual_seed(4)

            def body(x):
                if source == "default":
                    return F.dropout(torch.sin(x), 0.5)
                if source == "keyword":
                    return torch.sin(x) * torch.rand(3, generator=generator, dtype=DTYPE)
                return x.sin() * torch.empty_like(x).normal_(generator=generator)

            x = numbers(3).requires_grad_()
            y = loop(body, x, 13, slots=3)
            return y, torch.autograd.grad(y.sum(), x), torch.rand(1)

        assert_same(f(functx.remat_loop), f(plain_loop))

    @pytest.mark.parametrize("randomness", ["same", "different"])
    def test_random_numbers_under_vmap(self, randomness):
        def f(loop):
            def value(x):
                return loop(lambda x: F.dropout(torch.sin(x), 0.5), x, 9, slots=2).sum()

            torch.manual_seed(3)
            return functx.vmap(functx.grad(value), randomness=randomness)(numbers(4, 3))

        assert_same(f(functx.remat_loop), f(plain_loop))

    def test_a_step_may_count_itself(self):
        def f(loop):
            def body(state):
                i, x, seen = state
                return i + 1, torch.sin(x * (i + 1)), (*seen, i)

            x = numbers(3).requires_grad_()
            i, y, seen = loop(body, (0, x, ()), 10, slots=3)
            assert (i, seen) == (10, tuple(range(10)))
            return y, torch.autograd.grad(y.sum(), x)

        assert_same(f(functx.remat_loop), f(plain_loop))

    def test_batch_norm_counts_every_step_once(self):
        def f(loop):
            norm = nn.BatchNorm1d(3, dtype=DTYPE)
            out = backward(
                lambda m, x: loop(lambda x: m(x).sin(), x, 9, slots=2), norm, numbers(4, 3)
            )
            return out, dict(norm.named_buffers())

        assert_same(f(functx.remat_loop), f(plain_loop), eps=ROUNDINGS)

    def test_loops_in_loops_and_in_regions(self):
        def f(loop, remat):
            def inner(x):
                return loop(torch.sin, x * 1.1, 4, slots=2)

            x = numbers(3).requires_grad_()
            y = remat(lambda x: loop(inner, x, 5, slots=2))(x)
            return y, torch.autograd.grad(y.sum(), x)

        assert_same(f(functx.remat_loop, functx.remat), f(plain_loop, lambda f: f))

    def test_a_loop_that_differentiates(self):
        """Gradient descent through a scan, and the gradient of that with respect to its rate."""

        def f(loop):
            def trained(rate):
                def loss(w):
                    return (torch.sin(w * numbers(3)) - numbers(3, start=1.0)).square().sum()

                return loss(loop(lambda w: w - rate * functx.grad(loss)(w), numbers(3), 9, slots=3))

            return functx.grad(trained)(torch.tensor(0.1, dtype=DTYPE))

        assert_same(f(functx.remat_loop), f(plain_loop), eps=ROUNDINGS)


class TestScan:
    def test_pytrees(self):
        def body(carry, x):
            i, (h, frozen) = carry
            h = torch.tanh(h + x["a"] * x["b"].sum())
            return (i + 1, (h, frozen)), {"h": h, "i": i, "none": None, "flag": h.sum() > 0}

        xs = {"a": numbers(6, 3).requires_grad_(), "b": numbers(6, 2), "c": None}
        carry = (0, (numbers(3), torch.arange(3)))
        (i, (h, frozen)), ys = functx.remat_scan(body, carry, xs, slots=2)
        assert i == 6
        assert ys["i"].tolist() == list(range(6))
        assert ys["none"] is None
        assert ys["flag"].dtype == torch.bool
        assert torch.equal(frozen, torch.arange(3))
        assert torch.equal(ys["h"][-1], h)
        (gradient,) = torch.autograd.grad(ys["h"].sum(), xs["a"])

        h, hs = numbers(3), []
        for a, b in zip(xs["a"], xs["b"]):
            h = torch.tanh(h + a * b.sum())
            hs.append(h)
        assert_same(ys["h"], torch.stack(hs))
        assert_same(gradient, torch.autograd.grad(sum(h.sum() for h in hs), xs["a"])[0], ROUNDINGS)

    @pytest.mark.parametrize("length", [None, 0])
    def test_no_steps(self, length):
        before = torch.get_rng_state()
        xs = None if length == 0 else torch.empty(0, 3)
        carry, ys = functx.remat_scan(
            lambda c, x: (c, (F.dropout(c), None, 1)), torch.ones(2), xs, length
        )
        assert torch.equal(carry, torch.ones(2))
        assert ys[0].shape == (0, 2)
        assert ys[1] is None
        assert ys[2].shape == (0,)
        assert torch.equal(torch.get_rng_state(), before)
        assert functx.remat_loop(torch.sin, 3, 0) == 3

    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("slots", [1, 2, 8])
    def test_as_jax(self, reverse, slots):
        jax = pytest.importorskip("jax")

        def body(where):
            def step(carry, x):
                new = where.sin(carry * x["a"]) + x["b"]
                return new, (new * carry, x["a"])

            return step

        arrays = {"a": numbers(6, 3).float(), "b": numbers(6, start=1.0).float()}

        def ours(c):
            return functx.remat_scan(body(torch), c, arrays, reverse=reverse, slots=slots)

        theirs_xs = {k: jax.numpy.asarray(v.numpy()) for k, v in arrays.items()}

        def theirs(c):
            return jax.lax.scan(body(jax.numpy), c, theirs_xs, reverse=reverse)

        c = numbers(3).float()
        d = jax.numpy.asarray(c.numpy())
        for a, b in [(ours(c), theirs(d)), (functx.jacrev(ours)(c), jax.jacrev(theirs)(d))]:
            mine, other = torch.utils._pytree.tree_leaves(a), jax.tree.leaves(b)
            for x, y in zip(mine, other, strict=True):
                torch.testing.assert_close(x, torch.tensor(y.tolist()), rtol=1e-5, atol=1e-5)
