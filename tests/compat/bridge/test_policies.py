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


def same(policy):
    return policy(ours), policy(theirs)


SAME = {
    "nothing": same(lambda p: p.nothing_saveable),
    "everything": same(lambda p: p.everything_saveable),
    "dots": same(lambda p: p.dots_saveable),
    "dots without batch": same(lambda p: p.dots_with_no_batch_dims_saveable),
    "only": same(lambda p: p.save_only_these_names("a")),
    "any but": same(lambda p: p.save_any_names_but_these("a")),
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
    "none of either": (ours.dots_saveable & ~ours.dots_saveable, theirs.nothing_saveable),
}


def region(policy):
    return functx.remat(lambda *a: body(functx.checkpoint_name, *a), policy=policy)


@pytest.mark.parametrize("name", SAME)
def test_a_policy_keeps_what_that_of_jax_keeps(name):
    policy, expected = SAME[name]
    plain = lambda *a: body(checkpoint_name, *a)  # noqa: E731
    assert kept(region(policy)) == kept(jax.checkpoint(plain, policy=expected))
    assert jnp.allclose(functx.grad(region(policy))(W, X), jax.grad(plain)(W, X))


def test_policies_keep_different_things_and_all_but_products_no_named_product():
    assert len({tuple(kept(region(policy))) for policy, _ in SAME.values()}) >= 5
    named = lambda w, x: functx.checkpoint_name(x @ w, "y").sum() ** 2  # noqa: E731
    assert kept(functx.remat(named, policy=~ours.dots_saveable)) == []


@pytest.mark.parametrize(
    "policy",
    [
        ~ours.save_only_these_names("a"),
        ours.dots_saveable & ours.save_only_these_names("a"),
        ours.dots_saveable | ours.save_smaller_than(100),
        lambda ctx, op, *args, **kwargs: True,
    ],
)
def test_a_policy_that_jax_can_not_express_is_refused(policy):
    with pytest.raises(TypeError, match="no counterpart for JAX arrays"):
        functx.remat(jnp.sin, policy=policy)(X)
    with pytest.raises(TypeError, match="a budget is for torch tensors"):
        functx.remat(lambda x: x, budget=0.5)(jnp.ones(3))


@pytest.mark.parametrize(
    "policy",
    [
        ours.offload_dot_with_no_batch_dims("device", "pinned_host"),
        ours.offload(ours.save_only_these_names("a")),
        ours.save_and_offload_only_these_names(
            names_which_can_be_saved=["b"],
            names_which_can_be_offloaded=["a"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ],
)
def test_offload_goes_to_host_memory(policy):
    jaxpr = str(jax.make_jaxpr(jax.grad(region(policy)))(W, X))
    assert "pinned_host" in jaxpr or "Host" in jaxpr
