"""What policies keep: counts of operations in the pullback, as JAX has them, and bytes.

The counts are those of ``jax.checkpoint`` for the same programs and policies.
"""

import functools
import itertools

import pytest
import torch
from cases import WEIGHTS, X, layers, named, numbers
from references import Operations, assert_same, count, no_garbage_collection
from torch.utils.checkpoint import CheckpointPolicy

import functx
from functx import checkpoint_policies as cp

pytestmark = pytest.mark.usefixtures("no_hooks")
DOTS = ("mm", "bmm", "mv")


def dots(counts):
    return sum(counts[name] for name in DOTS)


def pulled(f, *args):
    """Operations of the pullback of ``f``, and what it gives: under a transform, and without."""
    out, pullback = functx.vjp(f, *args)
    with Operations() as under:
        gradients = pullback(torch.ones_like(out))
    leaves, spec = torch.utils._pytree.tree_flatten(args)
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    out = f(*torch.utils._pytree.tree_unflatten(leaves, spec))
    with Operations() as base:
        plain = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert_same(torch.utils._pytree.tree_leaves(gradients), list(plain))
    assert all(under.counts[k] == base.counts[k] for k in (*DOTS, "sin", "tanh"))
    return base.counts, plain


def only_sines(ctx, op, *args, **kwargs):
    assert not ctx.is_recompute
    return op is torch.ops.aten.sin.default


def in_torchs_words(ctx, op, *args, **kwargs):
    if op is torch.ops.aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {
    "none": (None, 9, 2),
    "nothing": (cp.nothing_saveable, 9, 2),
    "dots": (cp.dots_saveable, 6, 2),
    "dots by their other name": (cp.checkpoint_dots, 6, 2),
    "dots without batch dims": (cp.dots_with_no_batch_dims_saveable, 6, 2),
    "everything": (cp.everything_saveable, 6, 0),
    "anything but a name": (cp.save_anything_except_these_names("z"), 6, 0),
    "no name": (cp.save_any_names_but_these("z"), 9, 2),
    "a list": ([torch.ops.aten.mm.default], 6, 2),
    "a packet": ([torch.ops.aten.sin], 9, 0),
    "a function": (only_sines, 9, 0),
    "torch's words": (in_torchs_words, 6, 2),
    "either": (cp.dots_saveable | [torch.ops.aten.sin.default], 6, 0),
    "both": (cp.dots_saveable & [torch.ops.aten.sin.default], 9, 2),
    "not": (~cp.dots_saveable, 9, 0),
    "both policies": (cp.save_from_both_policies(cp.dots_saveable, only_sines), 6, 0),
    "small": (cp.save_smaller_than(4 * 5 * 8), 9, 2),
    "not so small": (cp.save_smaller_than(4 * 5 * 8 + 1), 6, 0),
    "large": (cp.save_at_least(4 * 5 * 8), 6, 0),
    "offloaded dots": (cp.offload_dot_with_no_batch_dims("device", "pinned_host"), 6, 2),
    "offloaded": (cp.offload(cp.everything_saveable), 6, 0),
}


class TestCounts:
    @pytest.mark.parametrize("name", POLICIES)
    def test_three_layers_recompute_what_they_recompute_in_jax(self, name):
        policy, products, sines = POLICIES[name]
        counts, gradients = pulled(functx.remat(layers, policy=policy), WEIGHTS, X)
        assert (dots(counts), counts["sin"]) == (products, sines)
        assert_same(gradients, pulled(layers, WEIGHTS, X)[1])

    @pytest.mark.parametrize("library", [functx, torch.func], ids=["functx", "torch.func"])
    @pytest.mark.parametrize("name", POLICIES)
    def test_vmap_changes_nothing(self, name, library):
        """Policies are asked about one example: a matrix and a vector, not a batch of them."""
        policy, products, sines = POLICIES[name]
        if "small" in name or name == "large":
            policy = {
                "small": cp.save_smaller_than(5 * 8),
                "not so small": cp.save_smaller_than(5 * 8 + 1),
                "large": cp.save_at_least(5 * 8),
            }[name]

        def per_example(f):
            value = library.grad(lambda w, x: f(w, x).sum())
            return count(library.vmap(value, (None, 0)), WEIGHTS, X)

        ours = per_example(functx.remat(layers, policy=policy))
        plain = per_example(layers)
        # A product more or less by how torch batches it: three are of one layer each.
        assert (dots(ours) - dots(plain), ours["sin"] - plain["sin"]) == (products - 6, sines)

    @pytest.mark.filterwarnings("ignore:remat. in the region .*, checkpoint_name gives")
    @pytest.mark.parametrize(
        ("policy", "sines"),
        [
            (cp.save_only_these_names("a"), 0),
            (cp.save_only_these_names("b"), 1),
            (cp.save_any_names_but_these("a"), 1),
            (cp.save_any_names_but_these("b"), 0),
            (cp.save_anything_except_these_names("a"), 1),
            (cp.save_anything_except_these_names("b"), 0),
            (~cp.save_only_these_names("a"), 1),
            (cp.everything_saveable & ~cp.save_only_these_names("a"), 1),
            (cp.save_only_these_names("a", "b"), 0),
            (cp.save_only_these_names("neither"), 1),
        ],
        ids=str,
    )
    def test_names_are_kept_or_not(self, policy, sines):
        assert pulled(functx.remat(named, policy=policy), X)[0]["sin"] == sines
        per_example = functx.vmap(
            functx.grad(lambda x: functx.remat(named, policy=policy)(x).sum())
        )
        assert count(per_example, X)["sin"] == 2 + sines

    @pytest.mark.parametrize(("name", "sines"), [("a", 0), ("b", 1)])
    def test_named_in_an_inner_region_and_kept_across_the_outer_one(self, name, sines):
        policy = cp.save_only_these_names(name)
        nested = functx.remat(lambda x: functx.remat(named)(x), policy=policy)
        assert pulled(nested, X)[0]["sin"] == sines

    @pytest.mark.parametrize(("name", "sines"), [("a", 2), ("b", 3)])
    def test_an_inner_policy_holds_while_the_outer_region_recomputes(self, name, sines):
        policy = cp.save_only_these_names(name)
        nested = functx.remat(lambda x: functx.remat(named, policy=policy)(x).sin())
        assert pulled(nested, X)[0]["sin"] == sines

    def test_products_with_batch_dims_are_told_apart(self):
        attention = lambda q, k: torch.tanh(torch.tanh(q @ k.mT) @ k)
        q, k = numbers(2, 3, 4), numbers(2, 3, 4, start=1.0)
        with_batch, without = (
            pulled(functx.remat(attention, policy=policy), q, k)[0]["bmm"]
            for policy in (cp.dots_saveable, cp.dots_with_no_batch_dims_saveable)
        )
        assert without == with_batch + 2


class TestAnyNumberOfTimes:
    """A second backward, a double backward, in-place operations: torch's own refuses them."""

    @pytest.mark.parametrize("policy", [cp.everything_saveable, cp.save_only_these_names("a")])
    def test_a_second_and_a_double_backward_are_right(self, policy):
        def second_order(f):
            x = X.clone().requires_grad_()
            value = f(x).sum()
            once = torch.autograd.grad(value, x, retain_graph=True)
            (twice,) = torch.autograd.grad(value, x, create_graph=True)
            return once, twice.detach(), torch.autograd.grad(twice.sin().sum(), x)

        assert_same(second_order(functx.remat(named, policy=policy)), second_order(named), eps=8)

    @pytest.mark.parametrize("policy", [cp.everything_saveable, cp.dots_saveable, only_sines])
    def test_what_was_kept_may_be_written_to(self, policy):
        def f(x):
            h = x.tanh() @ WEIGHTS[0]
            y = h.exp()
            h.mul_(2)
            return y * h.cos() * torch.tanh(y)

        counts, gradients = pulled(functx.remat(f, policy=policy), X)
        assert_same(gradients, pulled(f, X)[1])
        assert counts["mm"] == 1 + (policy is only_sines)

    def test_what_was_written_to_may_be_named(self):
        def f(x):
            h = (torch.tanh(x) * 2).mul_(3)
            h.add_(x)
            return torch.sin(torch.exp(functx.checkpoint_name(h, "h")))

        _, gradients = pulled(functx.remat(f, policy=cp.save_only_these_names("h")), X)
        assert_same(gradients, pulled(f, X)[1])

    def test_one_of_several_results_may_be_kept(self):
        def f(x):
            values, places = torch.sort(torch.tanh(x))
            return torch.sin(functx.checkpoint_name(values, "v")) * places

        for policy in (cp.save_only_these_names("v"), cp.everything_saveable):
            counts, gradients = pulled(functx.remat(f, policy=policy), X)
            assert_same(gradients, pulled(f, X)[1])
        assert counts["sort"] == 0


class TestBytes:
    def kept(self, policy, f=layers):
        weights = [w.detach().clone().requires_grad_() for w in WEIGHTS]
        with no_garbage_collection(), Operations() as operations:
            value = functx.remat(f, policy=policy)(weights, X)
            return (operations.live - value.numel() * 8) / (X.numel() * 8)

    def test_only_what_is_read_is_kept(self):
        assert self.kept(None) == 0
        assert self.kept(cp.dots_saveable) == 3
        assert self.kept(cp.everything_saveable) == 5  # the last sine is the result
        assert self.kept(only_sines) == 2

    def test_what_the_pullback_does_not_read_is_not_kept(self):
        f = lambda weights, x: torch.sin(x @ weights[0] + 1) * 2
        assert self.kept(cp.everything_saveable, f) == 1

    def test_a_part_is_kept_without_the_rest(self):
        def f(weights, x):
            h = torch.tanh(x @ torch.cat(weights, 1))
            return torch.sin(functx.checkpoint_name(h[:, :5], "part"))

        assert self.kept(cp.save_only_these_names("part"), f) == 1

    def test_kept_once_by_nested_regions(self):
        nested = lambda weights, x: functx.remat(layers, policy=cp.dots_saveable)(weights, x)
        assert self.kept(cp.dots_saveable, nested) == 3


def test_decisions_are_made_once():
    """A policy that answers differently each time: a replay does as the forward did."""
    answers = itertools.cycle([True, False, False])
    region = functools.partial(functx.remat, policy=lambda *args, **kwargs: next(answers))

    def program(remat):
        inner = remat(lambda x: torch.sin(torch.exp(x) * x))
        outer = remat(lambda x: inner(torch.tanh(x)) * x)
        return functx.grad(lambda x: functx.jvp(outer, (x,), (x,))[1].sum())(X)

    expected = program(lambda f: f)
    for _ in range(20):
        assert_same(program(region), expected, eps=8)
