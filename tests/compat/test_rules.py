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
    "deviation of equals": (
        lambda x: torch.cat([(0 * x + 1).std(1), x[:, :1].std(1, False)]),
        (3, 4),
    ),
    "digamma": (lambda x: 1 / torch.digamma(torch.cat([x, torch.tensor([0.0, -0.0])])), (4,)),
    "multilabel, one": (lambda x: functional.multilabel_margin_loss(x, LABELS[0]), (4,)),
}


def test_product_of_segments():
    lengths = torch.tensor([2, 0, 2])

    def product(x):
        return torch.segment_reduce(x, "prod", lengths=lengths).sum()

    got = jax.grad(to_jax(product))(jnp.asarray([2.0, 0.0, 3.0, 5.0]))
    np.testing.assert_allclose(got, [0, 2, 5, 3])


def test_derivatives_of_powers_of_zero():
    x, y = torch.tensor([0.0, 0, 0, 2, 2, -2, -2]), torch.tensor([0.0, 1, 2, 0, 3, 3, 0])

    def total(x, y):
        return (x**y).sum()

    # NaN in the exponent of a negative base does not reach the base.
    for argnums, size in ((0, 7), (1, 5), ((0, 1), 5)):
        expected = torch.func.grad(total, argnums)(x[:size], y[:size])
        arrays = jnp.asarray(x[:size].numpy()), jnp.asarray(y[:size].numpy())
        for f in (to_jax(total), jax.jit(to_jax(total))):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
                jax.grad(f, argnums)(*arrays),
                expected,
            )
    mixed = jax.grad(lambda a, b: jax.grad(to_jax(total))(a, b).sum(), 1)
    again = torch.func.grad(lambda a, b: torch.func.grad(total)(a, b).sum(), 1)
    np.testing.assert_allclose(mixed(jnp.asarray([2.0]), jnp.asarray([0.0])), again(x[3:4], y[3:4]))


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
