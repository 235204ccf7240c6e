"""Values that torch checks: in JAX a distribution of wrong arguments is NaN, not an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import distributions as td
from torch.nn import functional

import functx
from functx._errors import LoweringError
from functx.compat import to_jax

from ..helpers import arrays, assert_close

AT = torch.tensor([0.2, 0.3, 0.5])
ARRAY = jnp.asarray(AT.numpy())


def normal(loc, scale):
    return td.Normal(loc, scale).log_prob(torch.tensor(0.4)).sum()


def in_a_region(loc, scale):
    return functx.remat(normal)(2 * loc, scale) + loc.sum()


def gradient(loc, scale):
    return functx.grad(functx.remat(normal), 1)(loc, scale)


@pytest.fixture(autouse=True)
def _arguments_are_checked():
    """As by default: a function that was compiled before in this process has turned it off."""
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.mark.parametrize("f", [in_a_region, gradient])
def test_valid_arguments_give_torch_s_values_and_others_nan(f):
    lowered = jax.jit(to_jax(f))
    np.testing.assert_allclose(lowered(ARRAY, ARRAY), f(AT, AT).detach(), rtol=1e-5, atol=1e-5)
    assert np.isnan(lowered(ARRAY, -ARRAY)).all()
    slope = jax.jit(jax.grad(lambda *x: lowered(*x).sum(), 1))
    leaf = AT.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(AT, leaf).sum(), leaf)
    np.testing.assert_allclose(slope(ARRAY, ARRAY), expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(slope(ARRAY, -ARRAY)).all()
    out = jax.vmap(lowered, (None, 0))(ARRAY, jnp.stack([ARRAY, -ARRAY]))  # each its own answer
    assert [np.isnan(row).any() for row in out] == [False, True]


CHECKED = {
    "multivariate normal": lambda x: td.MultivariateNormal(x, torch.diag(x)).log_prob(x),
    "a sample out of support": lambda x: td.Dirichlet(x).log_prob(x),
    "divergence": lambda x: td.kl_divergence(td.Gamma(x, x), td.Gamma(x + 1, x)).sum(),
    "mixture": lambda x: td.MixtureSameFamily(td.Categorical(x), td.Normal(x, x)).log_prob(x).sum(),
}


@pytest.mark.parametrize("name", CHECKED)
def test_any_distribution_checks_its_arguments(name):
    f = CHECKED[name]
    lowered = jax.jit(to_jax(f))
    np.testing.assert_allclose(lowered(ARRAY), f(AT), rtol=2e-5)
    assert np.isnan(lowered(ARRAY * jnp.asarray([-1, 1, 1]))).all()


class Asking(td.constraints.Constraint):
    def check(self, value):
        return torch.tensor(bool((value > 0).all()))


class Own(td.Normal):
    arg_constraints = {"scale": Asking()}  # noqa: RUF012


def test_a_check_that_python_reads_is_refused():
    sampled = lambda x: td.VonMises(x, x).sample()  # until every draw is accepted # noqa: E731
    for f in (sampled, lambda x: Own(x, x).log_prob(x)):
        with pytest.raises(LoweringError, match="Python number"):
            to_jax(f, rng=True)(jax.random.key(0), ARRAY)


TABLE = torch.tensor([[0.1, 0.5, 0.2, 0.9], [1.0, 0.3, 0.4, 0.2], [0.7, 0.8, 0.1, 0.6]])
COUNTS, WEIGHTS = torch.tensor([1, 2, 1, 3]), torch.tensor([0.1, 0.5, 0.2, 0.4])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.cov(x[0], correction=0),
        lambda x: x.cov(aweights=WEIGHTS, fweights=COUNTS),
        torch.corrcoef,
        lambda x: functional.gaussian_nll_loss(x, x.flip(0), x**2, full=True),
        lambda x: functional.gaussian_nll_loss(x, x.flip(0), x[:, 0], reduction="none"),
        lambda x: functional.gaussian_nll_loss(x, x.flip(0), 2.0, reduction="sum"),
    ],
)
def test_other_functions_that_check_values_do_without(f):
    assert_close(jax.jit(to_jax(f))(arrays(TABLE)), f(TABLE))
    expected = torch.autograd.functional.jacobian(f, TABLE)
    assert_close(jax.jit(jax.jacrev(to_jax(f)))(arrays(TABLE)), expected, rtol=1e-5)
