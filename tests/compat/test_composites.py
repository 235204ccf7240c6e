"""Python functions of torch inside a trace: what they detach, and values that they check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import functx
from functx.compat import to_jax

from .networks import arrays, assert_close


def test_a_detach_inside_a_function_of_torch_stops_gradients():
    """``gumbel_softmax(hard=True)`` is one-hot with the gradient of the soft one."""
    weight = torch.tensor([1.0, 2.0, 4.0])
    x = jnp.asarray([0.3, -0.1, 0.2])

    def soft(x, hard):
        return (functional.gumbel_softmax(x, hard=hard) * weight).sum()

    key = jax.random.key(0)
    hard_gradient = jax.grad(to_jax(soft, rng=True), 1)(key, x, True)
    np.testing.assert_allclose(hard_gradient, jax.grad(to_jax(soft, rng=True), 1)(key, x, False))
    assert np.abs(hard_gradient).max() > 0.01
    inside = to_jax(functx.grad(soft), rng=True)(key, x, True)
    np.testing.assert_allclose(inside, hard_gradient, rtol=1e-6)
    assert float(to_jax(soft, rng=True)(key, x, True)) in (1.0, 2.0, 4.0)


X = torch.tensor([[0.1, 0.5, 0.2, 0.9], [1.0, 0.3, 0.4, 0.2], [0.7, 0.8, 0.1, 0.6]])
COUNTS, WEIGHTS = torch.tensor([1, 2, 1, 3]), torch.tensor([0.1, 0.5, 0.2, 0.4])
CASES = {
    "cov": torch.cov,
    "cov of a vector": lambda x: torch.cov(x[0], correction=0),
    "cov with counts": lambda x: torch.cov(x, fweights=COUNTS),
    "cov with weights": lambda x: x.cov(aweights=WEIGHTS, fweights=COUNTS),
    "corrcoef": torch.corrcoef,
    "corrcoef of a vector": lambda x: x[0].corrcoef(),
    "gaussian_nll_loss": lambda x: functional.gaussian_nll_loss(x, x.flip(0), x**2, full=True),
    "nll of one variance a row": lambda x: functional.gaussian_nll_loss(
        x, x.flip(0), x[:, 0] - 0.5, reduction="none"
    ),
    "nll of a number": lambda x: functional.gaussian_nll_loss(x, x.flip(0), 2.0, reduction="sum"),
}


@pytest.mark.parametrize("name", CASES)
def test_checks_of_values_are_left_out(name):
    f = CASES[name]
    x = X + 0.5 if "row" in name else X
    assert_close(to_jax(f)(arrays(x)), f(x))
    if "vector" not in name:
        expected = torch.func.jacrev(f)(x) if "nll" not in name else _jacobian(f, x)
        assert_close(jax.jacrev(to_jax(f))(arrays(x)), expected, rtol=1e-5)


def _jacobian(f, x):
    return torch.autograd.functional.jacobian(f, x)
