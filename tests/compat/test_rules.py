"""Operations whose samples in torch's database miss a case that models meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import functx
from functx.compat import to_jax


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def sgn(x):
    z = torch.complex(x, x.flip(0) * 2)
    return torch.view_as_real(torch.cat([z, 0 * z]).sgn())


def grouped(causal):
    def attention(x):
        q, k = x.reshape(1, 4, 6, 2), x.flip(0)[:24].reshape(1, 2, 6, 2)
        return functional.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True)

    return attention


LABELS = torch.tensor([[0, 2, -1, 1], [-1, 0, 0, 0], [3, 1, 0, 2]])

CASES = {
    "sgn of complex numbers": (sgn, (4,)),
    "grouped queries": (grouped(False), (48,)),
    "grouped queries, causal": (grouped(True), (48,)),
    # What follows the first -1 does not count.
    "multilabel": (lambda x: functional.multilabel_margin_loss(x, LABELS), (3, 4)),
    "multilabel, each": (
        lambda x: functional.multilabel_margin_loss(x, LABELS, reduction="none"),
        (3, 4),
    ),
    "multilabel, one": (lambda x: functional.multilabel_margin_loss(x, LABELS[0]), (4,)),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name):
    f, shape = CASES[name]
    x = drawn(*shape)

    def loss(x):
        return (f(x) + 1).square().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    array = jnp.asarray(x.numpy())
    np.testing.assert_allclose(to_jax(f)(array), f(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.grad(to_jax(loss))(array), expected, rtol=1e-4, atol=1e-5)
    inside = to_jax(lambda x: functx.grad(loss)(x))
    np.testing.assert_allclose(inside(array), expected, rtol=1e-4, atol=1e-5)
