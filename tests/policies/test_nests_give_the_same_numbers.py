"""Nests of regions with policies give the numbers of the program without remat."""

import pytest
import torch
from cases import DTYPE, identity, judged_by, numbers, seeded, unchanged
from references import assert_same
from torch import nn

import functx


class Pair(torch.autograd.Function):
    """Two results, one of them an integer."""

    @staticmethod
    def forward(a):
        return a.tanh() * 0.7, a.argsort(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[0])

    @staticmethod
    def backward(ctx, cotangent, _):
        a, out = ctx.saved_tensors
        return cotangent * a.cos() * out

    @staticmethod
    def vmap(info, in_dims, a):
        return Pair.apply(a.movedim(in_dims[0], 0)), (0, 0)


POLICIES = functx.checkpoint_policies
X = numbers(3)


def twice(f):
    """The gradient of a function, and that of it."""
    x = X.clone().requires_grad_()
    gradient = functx.grad(lambda x: f(x).sum())(x)
    return gradient, torch.autograd.grad(gradient.sum(), x)


def named_vectors_under_vmap(remat):
    """The product of a vector and a matrix is reshaped in place, which writes no value."""
    region = remat(
        lambda w, x: torch.tanh(functx.checkpoint_name(x @ w, "product")),
        policy=POLICIES.save_only_these_names("product"),
    )

    def loss(weights, x):
        for w in weights:
            x = region(w, x)
        return x.square().mean()

    weights = [numbers(3, 3, start=float(i)) for i in range(3)]
    return functx.vmap(functx.grad(loss), (None, 0))(weights, numbers(5, 3))


def what_an_outer_region_keeps_and_an_inner_one_writes_to(remat):
    """The inner region holds what the outer one kept, not the copy it may write to."""
    linear = seeded(lambda: nn.Linear(3, 3)).to(DTYPE)

    def f(x):
        def region():
            remat(linear)(x)
            return torch.sigmoid(x)

        y = remat(region, policy=POLICIES.dots_saveable)()
        return remat(lambda: torch.sigmoid(y.sin()), policy=POLICIES.dots_saveable)()

    x = X.clone().requires_grad_()
    out, tangent = functx.jvp(f, (x,), (torch.ones_like(x),))
    return out, tangent, torch.autograd.grad(out.sum() + tangent.sum(), x)


def a_tape_that_ends_in_what_is_not_read(remat):
    def f(x):
        v = torch.sin(x)

        def region(p):
            def inner():
                p * p
                return torch.sigmoid(v)

            inner_region = inner
            kept = remat(lambda t: inner_region() * t.sin(), policy=POLICIES.dots_saveable)
            return torch.sigmoid(functx.grad(lambda t: kept(t).sum())(v).sin().sin())

        w = remat(region, policy=POLICIES.everything_saveable)(torch.outer(v, v))
        return w * 0.5 + w.sin()

    return twice(f)


def a_copy_before_a_write_after_an_inner_region(remat):
    def f(x):
        def region(p, q):
            def middle(r, s):
                remat(lambda a, b: (p.mT, torch.sigmoid(b))[1])(s, s)
                return torch.sigmoid(x)

            v = remat(middle)(q, q)
            w = v * 0.7 + v.sum() * 0.1
            w.mul_(v)
            return torch.sigmoid(w)

        v = remat(region)(torch.outer(x, x), x)
        w = remat(lambda: torch.sigmoid(torch.sin(v)))()
        return w * 0.5 + w.sin()

    return twice(f)


def three_levels_of_regions(remat, policy=POLICIES.everything_saveable):
    """What the innermost keeps is decided once, also in the replay of a replay."""
    leaf = numbers(3, start=1.0).requires_grad_()

    def f(x):
        def region():
            value, order = Pair.apply(leaf)
            return torch.sigmoid(value.gather(-1, order) * x)

        return remat(region, policy=policy)()

    x = numbers(2, 3).requires_grad_()
    mapped = functx.vmap(remat(f), randomness="same")
    jacobian = functx.jacrev(remat(lambda x: mapped(x)))(x)
    return jacobian, torch.autograd.grad(jacobian.sum(), [x, leaf])


def a_value_from_before_it_was_written_to_is_not_kept_for_the_one_after(remat):
    """In a replay a draw runs, and what is done to it in place may be left out."""
    noisy = remat(lambda x: nn.functional.dropout(x, 0.5))
    scaled = remat(lambda x: noisy(x) * 0.5)
    gradient = functx.grad(lambda x: scaled(x).sum())
    region = remat(gradient, policy=POLICIES.everything_saveable)
    return seeded(region, torch.ones(8, dtype=DTYPE).requires_grad_())


def what_a_region_inside_handed_out_is_not_run_for(remat):
    """Replayed as a whole, it runs what it had kept, on what the region around left out."""

    def first(x):
        z = x.sigmoid()
        return (z * 2).mul_(z)

    def second(x):
        z = x.cos()
        return x, (x * 2 + 0).mul_(0.5) * z

    def third(x):
        a, b = remat(second, policy=POLICIES.everything_saveable)(remat(first)(x))
        return a * b

    fourth = lambda x: torch.sigmoid(functx.grad(lambda x: remat(third)(x).sum())(x))

    def region(x):
        return functx.grad(lambda x: remat(lambda x: remat(fourth)(x.sigmoid()))(x).sum())(x)

    x = X.clone().requires_grad_()
    out = remat(region, policy=POLICIES.everything_saveable)(x)
    return torch.autograd.grad(out.square().sum(), x)[0] * 1e4  # are small


PROGRAMS = [
    three_levels_of_regions,
    lambda remat: three_levels_of_regions(remat, POLICIES.save_smaller_than(40)),
    named_vectors_under_vmap,
    what_an_outer_region_keeps_and_an_inner_one_writes_to,
    a_tape_that_ends_in_what_is_not_read,
    a_copy_before_a_write_after_an_inner_region,
    a_value_from_before_it_was_written_to_is_not_kept_for_the_one_after,
    what_a_region_inside_handed_out_is_not_run_for,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_numbers_are_those_without_remat(program):
    expected = program(identity)
    assert all(t.abs().sum() > 1e-3 for t in torch.utils._pytree.tree_leaves(expected))
    assert_same(program(functx.remat), expected, eps=32)


@pytest.mark.parametrize("inner", [None, POLICIES.dots_saveable])
@pytest.mark.parametrize("between", [torch.clone, torch.sin])
@judged_by(unchanged, 64)
def test_of_several_results_those_that_were_kept_are_handed_on(remat, inner, between):
    """What batch_norm may write to is not kept inside; outside it is, and its siblings are not."""

    def f(x):
        return nn.functional.batch_norm(x.sort(-1)[0], None, None, training=True).pow(3).mean()

    inside = remat(f, policy=inner)
    region = remat(lambda x: inside(between(x)), policy=POLICIES.everything_saveable)
    x = numbers(6, 4).requires_grad_()
    plain = torch.autograd.grad(region(x), x)[0]
    return plain, functx.grad(region)(x), functx.hessian(region)(x[:2])


@pytest.mark.parametrize("read", [lambda y, v, a: (v * a).sin(), lambda y, v, a: (y @ v).sin()])
@judged_by(unchanged, 64)
def test_statistics_that_batch_norm_advances_are_kept_as_they_were(remat, read):
    """Its schema does not say that it writes; what was kept would be advanced once more."""

    def f(x, a):
        mean = torch.full((4,), 0.3, dtype=DTYPE)
        variance = mean.square() + 1.0
        y = nn.functional.batch_norm(x, mean, variance, training=True)
        return read(y, variance, a).sigmoid().sum()

    region = remat(f, policy=POLICIES.everything_saveable)
    x, a = numbers(6, 4).requires_grad_(), numbers(4, start=2.0).requires_grad_()
    plain = torch.autograd.grad(region(x, a), (x, a), allow_unused=True)
    return plain, functx.grad(region, (0, 1))(x, a)


@pytest.mark.parametrize("around", [0, 1, 2])
@judged_by(unchanged, 64)
def test_what_is_kept_three_regions_down_is_differentiated_twice(remat, around):
    """What is kept comes from an input that no region around is seen to read."""

    def nest(s):
        y = x.cos()

        def innermost(q):
            slope = functx.grad(lambda a: (a * s).sin().sum())(x)
            return x.cos() * slope, y.detach()

        return remat(innermost, policy=POLICIES.everything_saveable)(s)[0] * y, y.detach()

    for _ in range(around):
        nest = remat(nest)
    x = numbers(3).requires_grad_()
    out = remat(lambda p: nest(p)[0] * x.cos())(numbers(3, start=0.2))
    (g,) = torch.autograd.grad(out.exp().sum(), x, create_graph=True)
    return torch.autograd.grad(g.sin().sum(), x)[0]
