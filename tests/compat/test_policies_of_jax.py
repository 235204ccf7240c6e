"""functx's policies and names on JAX arrays keep what JAX's of the same name keep."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import functx
from functx import checkpoint_policies as ours

theirs = jax.checkpoint_policies
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
W = jnp.linspace(0.0, 1.0, 16).reshape(4, 4)


def body(name, w, x):
    a = jnp.sin(name(jnp.exp(jnp.tanh(x @ w)), "a"))
    b = jnp.einsum("bi,bi->b", a, jnp.cos(a))  # a product with a batch dimension
    return jnp.sin(name(jnp.sin(b), "b")).sum()


def kept(region):
    """Shapes of what the forward pass keeps beside the arguments, by JAX's account."""
    _, pullback = jax.vjp(region, W, X)
    leaves = jax.tree_util.tree_leaves(pullback)
    return sorted(a.shape for a in leaves if a is not W and a is not X and a.shape)


SAME = {
    "nothing": (ours.nothing_saveable, theirs.nothing_saveable),
    "everything": (ours.everything_saveable, theirs.everything_saveable),
    "dots": (ours.dots_saveable, theirs.dots_saveable),
    "dots without batch": (
        ours.dots_with_no_batch_dims_saveable,
        theirs.dots_with_no_batch_dims_saveable,
    ),
    "only": (ours.save_only_these_names("a"), theirs.save_only_these_names("a")),
    "any but": (ours.save_any_names_but_these("a"), theirs.save_any_names_but_these("a")),
    "either": (
        ours.dots_with_no_batch_dims_saveable | ours.save_only_these_names("b"),
        theirs.save_from_both_policies(
            theirs.dots_with_no_batch_dims_saveable, theirs.save_only_these_names("b")
        ),
    ),
    "both": (
        ours.dots_saveable & ours.dots_with_no_batch_dims_saveable,
        theirs.dots_with_no_batch_dims_saveable,
    ),
    "none of either": (
        ours.dots_saveable & ~ours.dots_saveable,
        theirs.nothing_saveable,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_is_kept(name):
    policy, expected = SAME[name]
    ours_keep = kept(functx.remat(lambda *a: body(functx.checkpoint_name, *a), policy=policy))
    theirs_keep = kept(jax.checkpoint(lambda *a: body(checkpoint_name, *a), policy=expected))
    assert ours_keep == theirs_keep
    gradient = functx.grad(functx.remat(lambda *a: body(functx.checkpoint_name, *a), policy=policy))
    assert jnp.allclose(gradient(W, X), jax.grad(lambda *a: body(checkpoint_name, *a))(W, X))


def test_the_policies_differ():
    found = {
        tuple(kept(functx.remat(lambda *a: body(functx.checkpoint_name, *a), policy=policy)))
        for policy, _ in SAME.values()
    }
    assert len(found) >= 5


def test_all_but_products():
    """``~dots``: a name is nothing of its own, so it does not keep a product."""
    named = lambda w, x: functx.checkpoint_name(x @ w, "y").sum() ** 2  # noqa: E731
    assert kept(functx.remat(named, policy=~ours.dots_saveable)) == []


@pytest.mark.parametrize(
    "policy",
    [
        ours.save_anything_except_these_names("a"),
        ~ours.save_only_these_names("a"),
        ours.dots_saveable & ours.save_only_these_names("a"),
        ours.save_smaller_than(100),
        ours.dots_saveable | ours.save_smaller_than(100),
        lambda ctx, op, *args, **kwargs: True,
    ],
)
def test_what_jax_can_t_say_is_refused(policy):
    with pytest.raises(TypeError, match="no counterpart for JAX arrays"):
        functx.remat(jnp.sin, policy=policy)(X)


@pytest.mark.parametrize(
    "policy",
    [
        ours.offload_dot_with_no_batch_dims("device", "pinned_host"),
        ours.offload(ours.dots_with_no_batch_dims_saveable),
        ours.offload(ours.save_only_these_names("a")),
        ours.save_and_offload_only_these_names(
            names_which_can_be_saved=["b"],
            names_which_can_be_offloaded=["a"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ],
)
def test_offload_goes_over(policy):
    region = functx.remat(lambda *a: body(functx.checkpoint_name, *a), policy=policy)
    assert "pinned_host" in str(jax.make_jaxpr(jax.grad(region))(W, X)) or "Host" in str(
        jax.make_jaxpr(jax.grad(region))(W, X)
    )


def test_a_budget_is_refused():
    with pytest.raises(TypeError, match="a budget is for torch tensors"):
        functx.remat(lambda x: x, budget=0.5)(jnp.ones(3))
