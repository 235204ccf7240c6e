"""`saved_residuals`: what is listed is what is kept, to the byte, and where it comes from."""

import collections

import pytest
import torch
from budgets.networks import NETWORKS
from cases import numbers
from layered import WEIGHTS, X, layers, named
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import functx
from functx import checkpoint_policies as cp
from functx import memory

pytestmark = pytest.mark.usefixtures("no_hooks")


def sources(residuals):
    return [r.source for r in residuals]


def with_leaves(args):
    """The same arguments, so that plain autograd differentiates all of them."""
    leaves, spec = pytree.tree_flatten(args)
    return pytree.tree_unflatten([t.detach().clone().requires_grad_() for t in leaves], spec)


def checked(f, *args):
    """The residuals of ``f``, whose bytes are those of another counter."""
    args = with_leaves(args)
    residuals = functx.saved_residuals(f, *args)
    measured = memory.profile(f, *args)
    assert residuals.kept == measured.kept
    assert residuals.nbytes == sum(r.nbytes for r in residuals)
    return residuals


def nested(weights, x):
    def outer(weights, x):
        return torch.sin(functx.remat(layers, policy=cp.dots_saveable)(weights[:2], x) @ weights[2])

    return functx.remat(outer, policy=cp.save_only_these_names("none"))(weights, x)


def attention(q, k):
    scores = functx.checkpoint_name(q @ k.mT, "scores")
    return torch.softmax(scores, -1) @ k


def in_place(weights, x):
    h = torch.sin(x @ weights[0])
    y = h.exp()
    h.mul_(2)
    return y * h.cos()


def several(weights, x):
    q, k = (x @ torch.cat(weights[:2], 1)).chunk(2, dim=1)
    values, places = torch.sort(torch.sin(functx.checkpoint_name(q, "q")) * k)
    return values, places, [x, torch.tanh(values)]


PROGRAMS = {
    "layers": (layers, WEIGHTS, X),
    "nested": (nested, WEIGHTS, X),
    "attention": (attention, numbers(2, 6, 4), numbers(2, 6, 4, start=1.0)),
    "in place": (in_place, WEIGHTS, X),
    "several results": (several, WEIGHTS, X),
    "dropout": (lambda x: F.dropout(torch.tanh(x), 0.5), X),
    "jvp": (lambda x: functx.jvp(torch.sin, (torch.exp(x),), (x,))[1], X),
    "grad": (functx.grad(lambda x: torch.sin(x.exp()).sum()), X),
    "vmap(grad)": (functx.vmap(functx.grad(lambda x: torch.sin(x.exp()).sum())), X),
    "the argument": (lambda x: x, X),
    "a constant": (lambda x: x.new_ones(3), X),
}
POLICIES = {
    "no region": None,
    "nothing": cp.nothing_saveable,
    "dots": cp.dots_saveable,
    "everything": cp.everything_saveable,
    "names": cp.save_only_these_names("scores", "q"),
    "offloaded": cp.offload(cp.everything_saveable),
}


def pairs():
    """Each program as it is, as a region, and with two policies."""
    some = [*POLICIES][2:]
    for i, program in enumerate(PROGRAMS):
        yield from ((program, p) for p in ("no region", "nothing", some[i % 4], some[(i + 1) % 4]))


@pytest.mark.parametrize(("program", "policy"), [*pairs()])
def test_bytes_are_those_of_live_storages(program, policy):
    f, *args = PROGRAMS[program]
    region = f if policy == "no region" else functx.remat(f, policy=POLICIES[policy])
    checked(region, *args)
    leaves = with_leaves(tuple(args))
    batched = pytree.tree_map(lambda t: torch.stack([t, t + 1]), leaves)
    checked(functx.vmap(region, randomness="different"), *batched)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("policy", [None, cp.dots_saveable, cp.everything_saveable])
def test_networks(name, policy):
    blocks, x = NETWORKS[name]()
    for run in (lambda f: f, lambda f: functx.remat(f, policy=policy)):

        def net(x, run=run):
            for block in blocks:
                x = run(block)(x)
            return x

        residuals = functx.saved_residuals(net, x)
        assert residuals.kept == memory.profile(net, x).kept
        assert all(r.source.startswith("a ") for r in residuals if not r.made) is False


class TestAgainstJax:
    """The same program and policy: as many values of the same shapes, and the same bytes."""

    @pytest.mark.parametrize(
        "policy",
        ["nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "a", "b", "ab"],
    )
    @pytest.mark.parametrize("batched", [False, True])
    def test_a_region_keeps_what_jax_keeps(self, policy, batched):
        jax = pytest.importorskip("jax")
        from jax import numpy as jnp
        from jax.ad_checkpoint import checkpoint_name

        def of(module):
            if hasattr(module, policy):
                return getattr(module, policy)
            return module.save_only_these_names(*policy)

        def theirs(ws, x):
            for i, w in enumerate(ws):
                x = checkpoint_name(jnp.sin(x @ w), "ab"[i % 2])
            return x.sum()

        def ours(ws, x):
            for i, w in enumerate(ws):
                x = functx.checkpoint_name(torch.sin(x @ w), "ab"[i % 2])
            return x.sum()

        theirs = jax.checkpoint(theirs, policy=of(jax.checkpoint_policies))
        region = functx.remat(ours, policy=of(cp))
        x, ws = X.float(), [w.float() for w in WEIGHTS]
        if batched and "dots" not in policy:  # which JAX judges after batching
            x = torch.stack([x, x + 1])
            theirs, region = jax.vmap(theirs, (None, 0)), functx.vmap(region, (None, 0))
        residuals = functx.saved_residuals(region, ws, x)
        _, pullback = jax.vjp(theirs, [jnp.asarray(w) for w in ws], jnp.asarray(x))
        leaves = [leaf for leaf in jax.tree_util.tree_leaves(pullback) if hasattr(leaf, "nbytes")]
        shapes = collections.Counter(tuple(leaf.shape) for leaf in leaves)
        assert collections.Counter(r.shape for r in residuals) == shapes
        assert residuals.nbytes == sum(leaf.nbytes for leaf in leaves)

    def test_jax_arrays_are_measured_by_jax(self, capsys):
        jax = pytest.importorskip("jax")
        from jax.ad_checkpoint import checkpoint_name

        def f(x):
            return jax.numpy.sin(checkpoint_name(jax.numpy.sin(x), "a"))

        f = jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("a"))
        residuals = functx.saved_residuals(f, jax.numpy.ones(3))
        assert [r.nbytes for r in residuals] == [12, 12]
        assert residuals[0].source == "argument x"
        assert residuals[1].source.startswith("named 'a'")
        assert [r.kind for r in residuals] == ["argument", "named"]
        functx.print_saved_residuals(f, jax.numpy.ones(3))
        assert "named 'a'" in capsys.readouterr().out


class TestWhatItIsAskedOf:
    def test_only_what_requires_grad_if_anything_does(self):
        w = WEIGHTS[0].clone().requires_grad_()
        assert len(functx.saved_residuals(torch.matmul, X, w)) == 1
        assert len(functx.saved_residuals(torch.matmul, X, w.detach())) == 2

    def test_arguments_without_derivatives_may_be_kept(self):
        index = torch.tensor([0, 2])
        residuals = functx.saved_residuals(lambda x, i: x.sin()[i], X, index)
        assert sources(residuals) == ["argument x", "argument i"]
        assert functx.saved_residuals(lambda i: i + 1, index) == []
        assert functx.saved_residuals(lambda: None) == []

    def test_the_first_two_fields_are_those_of_jax(self):
        (kept,) = functx.saved_residuals(lambda x: torch.sin(x), X)
        value, source, *_ = kept
        assert (str(value), source) == ("float64[4,5]", "argument x")
        assert (kept.shape, kept.dtype) == (X.shape, X.dtype)

    def test_no_grad_around_makes_no_difference(self):
        with torch.no_grad():
            assert len(functx.saved_residuals(named, X)) == 2
        with torch.inference_mode():
            assert len(functx.saved_residuals(named, X)) == 2

    @pytest.mark.parametrize("which", ["result", "hidden", "view", "cycle"])
    def test_a_tape_that_somebody_else_holds_too_is_listed(self, which):
        holder = []

        def f(x):
            hidden = torch.sin(torch.exp(x)) @ WEIGHTS[0]
            result = torch.cos(hidden.T).exp()
            if which == "cycle":
                own = [result, hidden]
                own.append(own)
            else:
                holder.append({"result": result, "hidden": hidden, "view": hidden.T}[which])
            return result

        x = X.clone().requires_grad_()
        expected = ["constant WEIGHTS[0]", "aten.exp", "aten.mm", "aten.exp"]
        found = functx.saved_residuals(f, x)
        assert [r.operation or r.source for r in found] == expected
        assert [r.operation or r.source for r in functx.saved_residuals(f, 2 * x)] == expected

    def test_what_is_held_by_somebody_else_is_not_the_tape_s(self):
        cache = []

        def f(x):
            cache.append(x.detach() * 2)
            return torch.sin(torch.sin(x))

        assert len(functx.saved_residuals(f, X)) == 2

    def test_inside_of_a_transform_it_is_an_error(self):
        def f(x):
            functx.saved_residuals(torch.sin, x)
            return x

        with pytest.raises(RuntimeError, match="outside, on the transformed function"):
            functx.vmap(f)(X)

    def test_what_is_no_function_is_an_error(self):
        for f in (functx.saved_residuals, functx.print_saved_residuals):
            with pytest.raises(TypeError, match=f"{f.__name__}: expected a callable"):
                f(X)
        with pytest.raises(ValueError, match="no function in the dictionary"):
            functx.print_saved_residuals({})
        with pytest.raises(ZeroDivisionError):
            functx.saved_residuals(lambda x: 1 / 0, X)
