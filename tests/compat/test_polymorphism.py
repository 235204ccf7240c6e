"""functx's transforms of JAX arrays are JAX's; mixtures are refused, and torch's cost nothing."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import functx
from functx import _arrays
from functx.compat import from_jax, to_jax

X = jnp.linspace(-1.0, 2.0, 12).reshape(4, 3)
W = jnp.array([0.5, -1.0, 2.0])


def g(w, x):
    return jnp.tanh(w * x) + jnp.sin(x) * w


def total(w, x):
    return g(w, x).sum()


def with_aux(w, x):
    return total(w, x), {"twice": 2 * x}


# Each with functx and with JAX.
PAIRS = {
    "vmap": (lambda: functx.vmap(g, (None, 0), 1)(W, X), lambda: jax.vmap(g, (None, 0), 1)(W, X)),
    "vmap, nested dims": (
        lambda: functx.vmap(lambda d: g(*d["p"]), ({"p": (None, 0)},))({"p": (W, X)}),
        lambda: jax.vmap(g, (None, 0))(W, X),
    ),
    "vmap, keywords are shared": (
        lambda: functx.vmap(lambda x, *, w: g(w, x))(X, w=W),
        lambda: jax.vmap(g, (None, 0))(W, X),
    ),
    "grad": (lambda: functx.grad(total, (0, 1))(W, W), lambda: jax.grad(total, (0, 1))(W, W)),
    "grad, aux": (
        lambda: functx.grad(with_aux, has_aux=True)(W, X),
        lambda: jax.grad(with_aux, has_aux=True)(W, X),
    ),
    "grad_and_value": (
        lambda: functx.grad_and_value(with_aux, 1, has_aux=True)(W, X)[::-1],
        lambda: jax.value_and_grad(with_aux, 1, has_aux=True)(W, X),
    ),
    "value_and_grad": (
        lambda: functx.value_and_grad(total)(W, x=X),
        lambda: jax.value_and_grad(total)(W, x=X),
    ),
    "vjp": (
        lambda: functx.vjp(g, W, X)[1](X, retain_graph=False),
        lambda: jax.vjp(g, W, X)[1](X),
    ),
    "vjp, aux": (
        lambda: functx.vjp(lambda x: (x, {"y": x}), X, has_aux=True)[2],
        lambda: {"y": X},
    ),
    "jvp": (
        lambda: functx.jvp(g, (W, X), (W, X)),
        lambda: jax.jvp(g, (W, X), (W, X)),
    ),
    "jvp, aux": (
        lambda: functx.jvp(lambda x: (x * x, x), (X,), (X,), has_aux=True),
        lambda: jax.jvp(lambda x: (x * x, x), (X,), (X,), has_aux=True),
    ),
    "linearize": (
        lambda: functx.linearize(lambda x: g(W, x), X)[1](X),
        lambda: jax.linearize(lambda x: g(W, x), X)[1](X),
    ),
    "jacrev": (lambda: functx.jacrev(g, (0, 1))(W, W), lambda: jax.jacrev(g, (0, 1))(W, W)),
    "jacfwd": (lambda: functx.jacfwd(g, 1)(W, W), lambda: jax.jacfwd(g, 1)(W, W)),
    "hessian": (lambda: functx.hessian(total)(W, W), lambda: jax.hessian(total)(W, W)),
    "the example of the manual": (
        lambda: functx.vmap(functx.grad(functx.remat(total), 1), (None, 0))(W, X),
        lambda: jax.vmap(jax.grad(jax.checkpoint(total), 1), (None, 0))(W, X),
    ),
    "inside jit and scan": (
        lambda: jax.jit(functx.grad(lambda w: jax.lax.scan(step, w, X)[0].sum()))(W),
        lambda: jax.grad(lambda w: jax.lax.scan(step, w, X)[0].sum())(W),
    ),
    "of what is closed over": (
        lambda: jax.grad(lambda w: functx.remat(lambda: total(w, X))())(W),
        lambda: jax.grad(lambda w: total(w, X))(W),
    ),
}


def step(w, x):
    return functx.remat(g)(w, x), None


@pytest.mark.parametrize("name", PAIRS)
def test_as_jax_does_it(name):
    ours, theirs = (jax.tree_util.tree_flatten(f()) for f in PAIRS[name])
    assert ours[1] == theirs[1]
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert isinstance(a, jax.Array)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_one_transform_takes_both_kinds():
    square = functx.grad(lambda x: (x * x).sum())
    assert square(torch.ones(2)).tolist() == [2, 2]
    assert square(jnp.ones(2)).tolist() == [2, 2]
    assert isinstance(square(jnp.ones(2)), jax.Array)
    assert isinstance(square(torch.ones(2)), torch.Tensor)


@pytest.mark.parametrize(
    "region",
    [
        functx.remat,
        lambda f: lambda *args: functx.checkpoint(f, *args, use_reentrant=False),
    ],
    ids=["remat", "checkpoint"],
)
def test_regions_are_jax_checkpoint(region):
    residuals = jax.vjp(region(lambda x: jnp.sin(jnp.sin(jnp.sin(x)))), X)[1]
    kept = [a for a in jax.tree_util.tree_leaves(residuals) if a.shape == X.shape]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], X)
    assert "remat" in str(jax.make_jaxpr(jax.grad(region(total)))(W, W))


def test_what_is_no_array_passes_through_a_region():
    @functx.remat
    def f(x, n, mode, *, flag):
        y = x.reshape(n, -1) if flag else x
        return {"y": y * 2, "mode": mode, "n": n}

    out = f(X, 6, "a", flag=True)
    assert out["y"].shape == (6, 2)
    assert (out["mode"], out["n"]) == ("a", 6)
    assert jax.grad(lambda x: f(x, 6, "a", flag=True)["y"].sum())(X).shape == X.shape


def test_regions_of_methods():
    class Model:
        scale = 3.0

        @functx.remat
        def __call__(self, x):
            return jnp.sin(x) * self.scale

    np.testing.assert_allclose(
        functx.grad(lambda x: Model()(x).sum())(X), 3 * jnp.cos(X), rtol=1e-6
    )


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


def test_tracers_and_tensors_are_a_mixture_too():
    with pytest.raises(TypeError, match=r"args\[1\] is a JAX array"):
        jax.jit(lambda x: functx.grad(total)(T, x))(W)


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
def test_options_that_jax_does_not_have(call, option):
    with pytest.raises(TypeError, match="has no meaning for JAX arrays") as error:
        call()
    assert option in str(error.value)


def test_keys_go_with_tensors():
    f = from_jax(lambda key, x: (x * jax.random.normal(key, x.shape)).sum())
    key = jax.random.key(0)
    expected = np.asarray(jax.random.normal(key, (3,)))
    np.testing.assert_array_equal(functx.grad(f, 1)(key, T), expected)


def test_torch_functions_inside_jax_are_torch_s():
    """A region without arguments is JAX's where JAX is tracing, but not while torch is."""
    outer = lambda x: functx.remat(lambda: torch.sin(x))().sum()  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(to_jax(outer)))(W), jnp.cos(W), rtol=1e-6)


def test_a_jax_array_loads_the_backend():
    code = """
import sys, functx
assert not any(name.startswith(("jax", "functx.compat")) for name in sys.modules)
import jax.numpy as jnp
assert "functx.compat._backend" not in sys.modules
assert functx.grad(lambda x: x * x)(jnp.float32(3)) == 6
assert "functx.compat._backend" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_jax_nothing_is_looked_at(monkeypatch):
    looked = []

    class Watched(dict):
        def get(self, name, default=None):
            looked.append(name)
            return default

    # Only what `_arrays` sees: an interpreter without its modules takes other threads down.
    monkeypatch.setattr(_arrays, "sys", types.SimpleNamespace(modules=Watched()))
    assert _arrays.backend_of("grad", (T,), {}) is None
    assert looked == ["jax"]


def test_dicts_that_are_no_pytree_of_jax():
    f = lambda d: (d["a"] * d[1]).sum()  # noqa: E731
    gradients = functx.grad(f)({"a": T, 1: 2 * T})
    assert gradients["a"].tolist() == [2, 2, 2]
