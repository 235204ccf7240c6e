"""Distributions that transform a uniform number: within the ulp that ``random`` promises."""

import jax
import numpy as np
import pytest

from functx.compat import random

from ..helpers import as_usual
from .draws import FLOATS, torch_dtype, ulps


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_is_within_3_ulp(dtype):
    with jax.enable_x64(True):
        expected = jax.random.normal(jax.random.key(5), (100_000,), dtype)
    ours = random.normal(random.key(5), (100_000,), torch_dtype(dtype))
    assert ulps(ours, expected) <= 3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("exponential", {}), ("gumbel", {}), ("gumbel", {"mode": "high"})],
)
def test_exponential_and_gumbel_are_within_ulps(name, arguments, dtype):
    options = {"shape": (50_000,), **arguments}
    with jax.enable_x64(True):
        expected = getattr(jax.random, name)(jax.random.key(6), dtype=dtype, **options)
    ours = getattr(random, name)(random.key(6), dtype=torch_dtype(dtype), **options)
    if name != "gumbel":
        assert ulps(ours, expected) <= 3
    rtol = 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(ours.numpy(), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("dtype", "lower", "upper"),
    [
        ("float16", -1.0, 2.5),
        ("bfloat16", -3.0, -1.0),
        ("float32", -3.0, -1.0),
        ("float64", -1.0, 2.5),
    ],
)
def test_truncated_normal_is_within_3_ulp(dtype, lower, upper):
    with jax.enable_x64(True):
        draw = as_usual(
            lambda *args: jax.random.truncated_normal(*args, shape=(50_000,), dtype=dtype)
        )
        expected = draw(jax.random.key(6), lower, upper)
    shape = (50_000,)
    ours = random.truncated_normal(random.key(6), lower, upper, shape, torch_dtype(dtype))
    assert ulps(ours, expected) <= 3
