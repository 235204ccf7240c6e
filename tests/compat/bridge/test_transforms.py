"""functx's transforms of JAX arrays are JAX's, and a mixture of arrays and tensors is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import functx
from functx.compat import from_jax, to_jax

X = jnp.linspace(-1.0, 2.0, 12).reshape(4, 3)
W = jnp.array([0.5, -1.0, 2.0])


def g(w, x):
    return jnp.tanh(w * x) + jnp.sin(x) * w


def total(w, x):
    return g(w, x).sum()


def with_aux(w, x):
    return total(w, x), {"twice": 2 * x}


def pair(f):
    """A call, with functx and with JAX."""
    return lambda: f(functx), lambda: f(jax)


PAIRS = {
    "vmap": pair(lambda t: t.vmap(g, (None, 0), 1)(W, X)),
    "vmap, nested dims": (
        lambda: functx.vmap(lambda d: g(*d["p"]), ({"p": (None, 0)},))({"p": (W, X)}),
        lambda: jax.vmap(g, (None, 0))(W, X),
    ),
    "vmap, keywords are shared": (
        lambda: functx.vmap(lambda x, *, w: g(w, x))(X, w=W),
        lambda: jax.vmap(g, (None, 0))(W, X),
    ),
    "grad": pair(lambda t: t.grad(total, (0, 1))(W, W)),
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


def step(w, x):
    return functx.remat(g)(w, x), None


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


def checkpointed(f):
    return lambda *args: functx.checkpoint(f, *args, use_reentrant=False)


@pytest.mark.parametrize("region", [functx.remat, checkpointed])
def test_a_region_is_jax_checkpoint(region):
    residuals = jax.vjp(region(lambda x: jnp.sin(jnp.sin(jnp.sin(x)))), X)[1]
    kept = [a for a in jax.tree_util.tree_leaves(residuals) if a.shape == X.shape]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], X)
    assert "remat" in str(jax.make_jaxpr(jax.grad(region(total)))(W, W))


def test_methods_and_arguments_that_are_no_arrays_pass_through_a_region():
    class Model:
        scale = 3.0

        @functx.remat
        def __call__(self, x, n, mode, *, flag):
            y = x.reshape(n, -1) if flag else x
            return {"y": jnp.sin(y) * self.scale, "mode": mode, "n": n}

    out = Model()(X, 6, "a", flag=True)
    assert out["y"].shape == (6, 2)
    assert (out["mode"], out["n"]) == ("a", 6)
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
        (lambda: functx.hessian(total)(W, T), ["functx.hessian"]),
        (lambda: functx.linearize(g, W, T), ["functx.linearize"]),
        (lambda: functx.jacfwd(g)(W, T), ["functx.jacfwd"]),
        (lambda: functx.jacrev(g)(W, T), ["functx.jacrev"]),
        (lambda: functx.value_and_grad(g)(W, T), ["functx.value_and_grad", "from_jax"]),
        (lambda: functx.grad_and_value(g)(W, T), ["functx.grad_and_value", "to_jax"]),
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
    outer = lambda x: functx.remat(lambda: torch.sin(x))().sum()  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(to_jax(outer)))(W), jnp.cos(W), rtol=1e-6)
