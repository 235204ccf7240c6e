"""Embeddings in JAX: torch defines their derivatives apart from their values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from functx.compat import to_jax

PLACES = torch.tensor([[0, 1, 0, 3], [3, 3, 4, 0]])
OPTIONS = {
    "padding": (functional.embedding, {"padding_idx": 0}),
    "last is padding": (functional.embedding, {"padding_idx": -6}),
    "by frequency": (functional.embedding, {"scale_grad_by_freq": True}),
    "both": (functional.embedding, {"scale_grad_by_freq": True, "padding_idx": 3}),
    "bag": (functional.embedding_bag, {"padding_idx": 0, "mode": "mean"}),
    "max of a bag": (functional.embedding_bag, {"mode": "max"}),  # of equals, the first
    "padded max": (functional.embedding_bag, {"padding_idx": 3, "mode": "max"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradient(name):
    f, options = OPTIONS[name]
    weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))

    def loss(weight):
        return (f(PLACES, weight, **options) + 1).square().sum()

    leaf = weight.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    array = jnp.asarray(weight.numpy())
    lowered = to_jax(loss)
    np.testing.assert_allclose(lowered(array), loss(weight), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lowered)(array), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(lowered))(array[None])[0], expected, rtol=1e-5, atol=1e-6
    )


def test_bag_by_frequency_is_as_documented():
    # Each row's gradient over how often it was read; torch's kernel takes another row's count.
    def loss(weight):
        return functional.embedding_bag(PLACES, weight, mode="sum", scale_grad_by_freq=True).sum()

    got = jax.grad(to_jax(loss))(jnp.ones((6, 1)))
    np.testing.assert_allclose(got[:, 0], [1, 1, 0, 1, 1, 0])
