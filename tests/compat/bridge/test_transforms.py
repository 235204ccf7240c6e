"""functx's transforms, policies and loops of JAX arrays are JAX's; a mixture is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

import functx
from functx import checkpoint_policies as ours
from functx.compat import from_jax, to_jax

from .. import helpers

X = jnp.linspace(-1.0, 2.0, 12).reshape(4, 3)
W = jnp.array([0.5, -1.0, 2.0])
assert_close = partial(helpers.assert_close, rtol=1e-4)


g = lambda w, x: jnp.tanh(w * x) + jnp.sin(x) * w
total = lambda w, x: g(w, x).sum()
with_aux = lambda w, x: (total(w, x), {"twice": 2 * x})


def step(w, x):
    return functx.remat(g)(w, x), None


def pair(f):
    """A call, with functx and with JAX."""
    return lambda: f(functx), lambda: f(jax)


PAIRS = {
    "vmap": pair(lambda t: t.vmap(g, (None, 0), 1)(W, X)),
    "vmap, nested": pair(
        lambda t: t.vmap(lambda d: g(*d["p"]), ({"p": (None, 0)},))({"p": (W, X)})
    ),
    "vmap, keywords are shared": (
        lambda: functx.vmap(lambda x, *, w: g(w, x))(X, w=W),
        lambda: jax.vmap(g, (None, 0))(W, X),
    ),
    "grad, aux": pair(lambda t: t.grad(with_aux, has_aux=True)(W, X)),
    "grad_and_value": (
        lambda: functx.grad_and_value(with_aux, 1, has_aux=True)(W, X)[::-1],
        lambda: jax.value_and_grad(with_aux, 1, has_aux=True)(W, X),
    ),
    "value_and_grad": pair(lambda t: t.value_and_grad(total)(W, x=X)),
    "vjp": (lambda: functx.vjp(g, W, X)[1](X, retain_graph=False), lambda: jax.vjp(g, W, X)[1](X)),
    "vjp, aux": pair(lambda t: t.vjp(lambda x: (x, {"y": x}), X, has_aux=True)[2]),
    "jvp": pair(lambda t: t.jvp(g, (W, X), (W, X))),
    "jvp, aux": pair(lambda t: t.jvp(lambda x: (x * x, x), (X,), (X,), has_aux=True)),
    "linearize": pair(lambda t: t.linearize(lambda x: g(W, x), X)[1](X)),
    "jacrev": pair(lambda t: t.jacrev(g, (0, 1))(W, W)),
    "jacfwd": pair(lambda t: t.jacfwd(g, 1)(W, W)),
    "hessian": pair(lambda t: t.hessian(total)(W, W)),
    "per example, of a region": (
        lambda: functx.vmap(functx.grad(functx.remat(total), 1), (None, 0))(W, X),
        lambda: jax.vmap(jax.grad(jax.checkpoint(total), 1), (None, 0))(W, X),
    ),
    "inside jit and scan": pair(
        lambda t: jax.jit(t.grad(lambda w: jax.lax.scan(step, w, X)[0].sum()))(W)
    ),
    "of what is closed over": (
        lambda: jax.grad(lambda w: functx.remat(lambda: total(w, X))())(W),
        lambda: jax.grad(lambda w: total(w, X))(W),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_transform_of_arrays_is_that_of_jax(name):
    ours, theirs = (jax.tree_util.tree_flatten(f()) for f in PAIRS[name])
    assert ours[1] == theirs[1]
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert isinstance(a, jax.Array)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_one_transform_takes_both_kinds():
    square = functx.grad(lambda x: (x * x).sum())
    for x, kind in ((torch.ones(2), torch.Tensor), (jnp.ones(2), jax.Array)):
        assert square(x).tolist() == [2, 2]
        assert isinstance(square(x), kind)
    # A dict that is no pytree of JAX is fine with tensors.
    gradients = functx.grad(lambda d: (d["a"] * d[1]).sum())({"a": T, 1: 2 * T})
    assert gradients["a"].tolist() == [2, 2, 2]


def test_methods_and_arguments_that_are_no_arrays_pass_through_a_region():
    class Model:
        scale = 3.0

        @functx.remat
        def __call__(self, x, n, mode, *, flag):
            y = x.reshape(n, -1) if flag else x
            return {"y": jnp.sin(y) * self.scale, "mode": mode, "n": n}

    out = Model()(X, 6, "a", flag=True)
    assert (out["y"].shape, out["mode"], out["n"]) == ((6, 2), "a", 6)
    gradient = functx.grad(lambda x: Model()(x, 6, "a", flag=True)["y"].sum())(X)
    np.testing.assert_allclose(gradient, 3 * jnp.cos(X), rtol=1e-6)


T = torch.ones(3)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: functx.grad(total)(T, W), ["args[0] is a torch", "args[1] is a JAX"]),
        (lambda: functx.grad(total)(T, x=W), ["args[0] is a torch", "x is a JAX"]),
        (lambda: functx.vmap(total)({"a": T}, [W]), ["args[0]['a'] is a torch", "args[1][0] is"]),
        (lambda: functx.vjp(g, W, T), ["args[0] is a JAX", "args[1] is a torch"]),
        (lambda: functx.jvp(g, (W, X), (T, X)), ["args[0][0] is a JAX", "args[1][0] is a torch"]),
        (lambda: functx.remat(g)(W, T), ["functx.remat", "args[1] is a torch"]),
        (lambda: functx.linearize(g, W, T), ["functx.linearize"]),
        *[
            (lambda name=name: getattr(functx, name)(g)(W, T), [f"functx.{name}", "from_jax"])
            for name in ("hessian", "jacfwd", "jacrev", "value_and_grad", "grad_and_value")
        ],
    ],
)
def test_mixtures_are_refused_by_name(call, names):
    with pytest.raises(TypeError) as error:
        call()
    for name in names:
        assert name in str(error.value)


def test_tracers_and_tensors_are_a_mixture_but_keys_are_not():
    with pytest.raises(TypeError, match=r"args\[1\] is a JAX array"):
        jax.jit(lambda x: functx.grad(total)(T, x))(W)
    f = from_jax(lambda key, x: (x * jax.random.normal(key, x.shape)).sum())
    key = jax.random.key(0)
    np.testing.assert_array_equal(functx.grad(f, 1)(key, T), jax.random.normal(key, (3,)))


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda: functx.vmap(g, randomness="different")(X, X), "randomness='different'"),
        (lambda: functx.vmap(g, chunk_size=2)(X, X), "chunk_size=2"),
        (lambda: functx.jacrev(g, chunk_size=2)(W, W), "chunk_size=2"),
        (lambda: functx.jacfwd(g, randomness="same")(W, W), "randomness='same'"),
        (lambda: functx.jvp(g, (W, W), (W, W), strict=True), "strict=True"),
    ],
)
def test_an_option_that_jax_lacks_is_refused(call, option):
    with pytest.raises(TypeError, match="has no meaning for JAX arrays") as error:
        call()
    assert option in str(error.value)


def test_a_lowered_region_without_arguments_is_torch_s():
    """A region without arguments is JAX's where JAX is tracing, but not while torch is."""
    outer = lambda x: functx.remat(lambda: torch.sin(x))().sum()
    np.testing.assert_allclose(jax.jit(jax.grad(to_jax(outer)))(W), jnp.cos(W), rtol=1e-6)


theirs = jax.checkpoint_policies
ROWS = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
SQUARE = jnp.linspace(0.0, 1.0, 16).reshape(4, 4)


def body(name, w, x):
    a = jnp.sin(name(jnp.exp(jnp.tanh(x @ w)), "a"))
    b = jnp.einsum("bi,bi->b", a, jnp.cos(a))  # a product with a batch dimension
    return jnp.sin(name(jnp.sin(b), "b")).sum()


def kept(region):
    """Shapes of what the forward pass keeps beside the arguments, by JAX's account."""
    _, pullback = jax.vjp(region, SQUARE, ROWS)
    leaves = jax.tree_util.tree_leaves(pullback)
    return sorted(a.shape for a in leaves if a is not SQUARE and a is not ROWS and a.shape)


def same(policy):
    return policy(ours), policy(theirs)


SAME = {
    "none": (None, None),
    "nothing": same(lambda p: p.nothing_saveable),
    "everything": same(lambda p: p.everything_saveable),
    "dots": same(lambda p: p.dots_saveable),
    "dots without batch": same(lambda p: p.dots_with_no_batch_dims_saveable),
    "only": same(lambda p: p.save_only_these_names("a")),
    "any but": same(lambda p: p.save_any_names_but_these("a")),
    "either": (
        ours.dots_saveable | ours.save_only_these_names("b"),
        theirs.save_from_both_policies(theirs.dots_saveable, theirs.save_only_these_names("b")),
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
def test_a_region_and_its_policy_keep_what_those_of_jax_keep(name):
    policy, expected = SAME[name]
    plain = lambda *a: body(checkpoint_name, *a)
    assert kept(region(policy)) == kept(jax.checkpoint(plain, policy=expected))
    assert jnp.allclose(functx.grad(region(policy))(SQUARE, ROWS), jax.grad(plain)(SQUARE, ROWS))


def test_policies_keep_different_things_and_all_but_products_no_named_product():
    assert len({tuple(kept(region(policy))) for policy, _ in SAME.values()}) >= 5
    checkpoint = lambda *args: functx.checkpoint(body, checkpoint_name, *args, use_reentrant=False)
    assert kept(checkpoint) == kept(region(None))
    assert "remat" in str(jax.make_jaxpr(jax.grad(checkpoint))(SQUARE, ROWS))
    named = lambda w, x: functx.checkpoint_name(x @ w, "y").sum() ** 2
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
        functx.remat(jnp.sin, policy=policy)(ROWS)
    with pytest.raises(TypeError, match="a budget is for torch tensors; use a policy"):
        functx.remat(lambda x: x, budget=0.5)(jnp.ones(3))


OFFLOAD = {"offload_src": "device", "offload_dst": "pinned_host"}


@pytest.mark.parametrize(
    "policy",
    [
        ours.offload_dot_with_no_batch_dims("device", "pinned_host"),
        ours.offload(ours.save_only_these_names("a")),
        ours.save_and_offload_only_these_names(
            names_which_can_be_saved=["b"], names_which_can_be_offloaded=["a"], **OFFLOAD
        ),
    ],
)
def test_offload_goes_to_host_memory(policy):
    jaxpr = str(jax.make_jaxpr(jax.grad(region(policy)))(SQUARE, ROWS))
    assert "pinned_host" in jaxpr or "Host" in jaxpr


MATRIX = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32) / 2
XS = {"a": jnp.asarray(np.random.default_rng(1).normal(size=(23, 3)), jnp.float32)}
START = jnp.ones(3)


def scan_body(carry, x):
    new = jnp.tanh(carry @ MATRIX + x["a"])
    return new, {"sum": new.sum(), "none": None}


def scan_loss(scan):
    def f(carry, xs):
        carry, ys = scan(carry, xs)
        return (carry**2).sum() + (ys["sum"] ** 2).sum()

    return f


def scanned(**options):
    return lambda carry, xs: functx.remat_scan(scan_body, carry, xs, **options)


@pytest.mark.parametrize(
    ("slots", "reverse"),
    [
        (None, False),
        pytest.param(None, True, marks=pytest.mark.sweep),
        pytest.param(8, True, marks=pytest.mark.sweep),
        (22, False),
    ],
)
def test_a_scan_is_that_of_jax(slots, reverse):
    ours = scanned(reverse=reverse, slots=slots)
    theirs = lambda carry, xs: jax.lax.scan(scan_body, carry, xs, reverse=reverse)
    assert_close(ours(START, XS), theirs(START, XS))
    assert_close(*(jax.grad(scan_loss(f), (0, 1))(START, XS) for f in (ours, theirs)))
    if slots == 22:
        f, g, rows = scan_loss(ours), scan_loss(theirs), jnp.stack([START, 2 * START])
        assert_close(*(functx.vmap(functx.grad(h), (0, None))(rows, XS) for h in (f, g)))
        assert_close(*(jax.jit(jax.jacfwd(jax.grad(h)))(START, XS) for h in (f, g)))
        assert_close(*(functx.jvp(h, (START, XS), (START, XS)) for h in (f, g)))


# Of 23 steps by scans of 23; 5 and 5; 3, 3 and 3; 2, 2, 2, 2 and 2.
@pytest.mark.parametrize(
    ("slots", "depth", "outer"), [(23, 1, 23), (22, 2, 5), (9, 2, 5), (8, 3, 3), (6, 5, 2)]
)
def test_no_more_carries_than_slots_are_kept(slots, depth, outer):
    f = scanned(slots=slots)
    jaxpr = str(jax.make_jaxpr(f)(START, XS))
    assert jaxpr.count("scan[") >= depth
    pullback = jax.vjp(lambda c: scan_loss(f)(c, XS), START)[1]
    leaves = [x for x in jax.tree.leaves(pullback) if x.shape[1:] == (3,) and x is not MATRIX]
    kept = sum(leaf.nbytes for leaf in leaves)
    # Carries, and the slices of xs that are read again, which are an argument.
    assert kept - XS["a"].nbytes <= outer * START.nbytes


def test_a_loop_is_a_scan_of_its_carry():
    def ours(x, n=13, **options):
        return functx.remat_loop(lambda h: jnp.tanh(h @ MATRIX), x, n, **options).sum()

    def theirs(x):
        for _ in range(13):
            x = jnp.tanh(x @ MATRIX)
        return x.sum()

    assert_close(*(jax.grad(f)(START) for f in (ours, theirs)))
    assert_close(jax.grad(ours)(START), jax.grad(lambda x: ours(x, slots=6))(START))
    assert_close(ours(START, 0), START.sum())
    assert "scan" in str(jax.make_jaxpr(ours)(START))
    # One that counts in Python is unrolled.
    weights = [MATRIX, MATRIX * 2, MATRIX * 3]
    step = lambda s: (s[0] + 1, s[1] @ weights[s[0]])
    assert_close(functx.remat_loop(step, (0, START), 3), (3, START @ MATRIX @ MATRIX @ MATRIX * 6))


def test_a_loop_with_a_condition():
    def root(a, **options):
        return functx.remat_loop(
            lambda x: (x + a / x) / 2, a, cond=lambda x: jnp.abs(x * x - a) > 1e-5, **options
        )

    numbers = jnp.array([4.0, 9.0, 16.0])
    assert_close(functx.vmap(root)(numbers), jnp.sqrt(numbers))
    assert_close(jax.jit(jax.jvp, static_argnums=0)(root, (4.0,), (1.0,)), (2.0, 0.25))
    bounded = functx.vmap(functx.grad(lambda a: root(a, steps=20)))(numbers)
    assert_close(bounded, 0.5 / jnp.sqrt(numbers))
    with pytest.raises(ValueError, match="Reverse-mode"):
        functx.grad(root)(numbers[0])


def test_wrong_use_says_what_to_do():
    with pytest.raises(ValueError, match=r"23 steps over JAX arrays need 6 slots or more, got 5"):
        functx.remat_scan(scan_body, START, XS, slots=5)
    with pytest.raises(ValueError, match="length"):
        functx.remat_scan(scan_body, START, XS, 4)
    with pytest.raises(TypeError, match="expected a callable, got 3"):
        functx.remat_loop(lambda x: x, START, 3, cond=3)
    assert_close(functx.remat_scan(lambda c, _: (c * 2, None), START, length=4)[0], START * 16)
    empty = {"a": jnp.zeros((0, 3))}
    assert functx.remat_scan(scan_body, START, empty)[1]["sum"].shape == (0,)
