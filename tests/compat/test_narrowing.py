"""With 64-bit types off nothing is narrowed silently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from functx._errors import LoweringError
from functx.compat import to_jax


def test_labels_are_int64_to_torch():
    seen = []

    def f(x, y):
        seen.append(y.dtype)
        return torch.nn.functional.cross_entropy(x, y)

    logits = torch.randn(3, 4)
    got = to_jax(f)(jnp.asarray(logits.numpy()), jnp.array([0, 1, 3]))
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 3]))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert seen == [torch.int64]
    with jax.enable_x64(True):
        to_jax(f)(jnp.ones((3, 4), jnp.float32), jnp.array([0, 1, 3]))
    assert seen[1] == torch.int64


def test_int32_stays_int32_with_x64():
    with jax.enable_x64(True):
        out = to_jax(lambda x: x + 1)(jnp.ones(2, jnp.int32))
    assert out.dtype == jnp.int32


def test_integers_that_fit_pass_and_others_do_not():
    small, big = torch.tensor([5]), torch.tensor([2**40])
    assert to_jax(lambda x: x + small)(jnp.ones(1, jnp.int32)).tolist() == [6]
    with pytest.raises(LoweringError, match="do not fit"):
        to_jax(lambda x: x + big)(jnp.ones(1, jnp.int32))
    with jax.enable_x64(True):
        assert to_jax(lambda x: x + big)(jnp.ones(1, jnp.int64)).tolist() == [2**40 + 1]


def test_float64_is_refused_and_says_how():
    for f in (
        lambda x: x.double() * 2,
        lambda x: x + torch.ones(2, dtype=torch.float64),
    ):
        with pytest.raises(LoweringError, match=r"jax\.enable_x64"):
            to_jax(f)(jnp.ones(2))
        with jax.enable_x64(True):
            assert to_jax(f)(jnp.ones(2, jnp.float32)).tolist() == [2, 2]


def test_numpy_float64_argument():
    with pytest.raises(LoweringError, match="float64"):
        to_jax(torch.sin)(np.ones(2))


def test_float32_is_not_computed_in_float64():
    x = torch.linspace(-2, 2, 50)

    def f(x):
        return torch.nn.functional.gelu(x) + torch.nn.functional.gelu(x, approximate="tanh")

    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(to_jax(f))(jnp.asarray(x.numpy())))
    assert "f64[50]" not in text
