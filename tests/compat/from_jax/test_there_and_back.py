"""A JAX function in a torch function that goes to JAX: the program itself, in line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import functx
from functx._errors import LoweringError
from functx.compat import from_jax, to_jax


def inner(w, x):
    return jnp.tanh(w * x) * w


f = from_jax(inner)
W, X = jnp.linspace(0.5, 1.5, 3), jnp.linspace(-1.0, 1.0, 3)


def there(w, x):
    return (f(w, torch.sin(x)) * w).sum()


def expected(w, x):
    return (inner(w, jnp.sin(x)) * w).sum()


def vmapped(gradient):
    return lambda w, x: gradient(w, jnp.stack([x, 2 * x]))


COMPOSED = {
    "grad": (jax.grad(to_jax(there), (0, 1)), jax.grad(expected, (0, 1))),
    "hessian": (jax.hessian(to_jax(there)), jax.hessian(expected)),
    "grad inside": (to_jax(torch.func.grad(there)), jax.grad(expected)),
    "grad of a region": (to_jax(functx.grad(functx.remat(there))), jax.grad(expected)),
    "grad of grad": (jax.jacrev(to_jax(functx.grad(functx.remat(there)))), jax.hessian(expected)),
    "vmap(grad)": (
        vmapped(jax.vmap(jax.grad(to_jax(there)), (None, 0))),
        vmapped(jax.vmap(jax.grad(expected), (None, 0))),
    ),
    "vmap(grad) inside": (
        vmapped(to_jax(functx.vmap(functx.grad(there), (None, 0)))),
        vmapped(jax.vmap(jax.grad(expected), (None, 0))),
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_it_is_as_without_the_way_round(name):
    ours, theirs = COMPOSED[name]
    got, want = (jax.tree.leaves(g(W, X)) for g in (jax.jit(ours), jax.jit(theirs)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert "callback" not in str(jax.make_jaxpr(ours)(W, X))


def test_it_goes_back_again():
    x = torch.from_numpy(np.array(X)).requires_grad_()
    w = torch.from_numpy(np.array(W)).requires_grad_()
    from_jax(to_jax(there))(w, x).backward()
    got = w.grad, x.grad
    for a, b in zip(got, jax.grad(expected, (0, 1))(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_other_settings_are_refused_and_a_number_is_a_constant():
    wide = from_jax(inner, enable_x64=True)
    with pytest.raises(LoweringError, match="other settings"):
        to_jax(lambda w, x: wide(w, x))(W, W)
    scaled = from_jax(lambda x, s: jnp.sin(x) * s)
    gradient = to_jax(functx.grad(lambda x: functx.remat(lambda x: scaled(x, 2.5))(x).sum()))
    np.testing.assert_allclose(gradient(W), 2.5 * jnp.cos(W), rtol=1e-6)
