"""torch.distributions in JAX: what they check of their arguments makes results NaN, not errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import distributions as td

import functx
from functx._errors import LoweringError
from functx.compat import to_jax

AT = torch.tensor([0.2, 0.3, 0.5])
ARRAY = jnp.asarray(AT.numpy())


def normal(loc, scale):
    return td.Normal(loc, scale).log_prob(torch.tensor(0.4)).sum()


def in_a_region(loc, scale):
    return functx.remat(normal)(2 * loc, scale) + loc.sum()


def gradient(loc, scale):
    return functx.grad(functx.remat(normal), 1)(loc, scale)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loc, scale):
        ctx.save_for_backward(loc, scale)
        return normal(loc, scale)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return tuple(g * d for d in torch.autograd.grad(normal(*x), x))


@pytest.fixture(autouse=True)
def _arguments_are_checked():
    """As by default: a function that was compiled before in this process has turned it off."""
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.mark.parametrize("f", [normal, in_a_region, gradient, Function.apply])
def test_valid_arguments_give_torch_s_values_and_others_nan(f):
    lowered = to_jax(f)
    np.testing.assert_allclose(lowered(ARRAY, ARRAY), f(AT, AT).detach(), rtol=1e-5, atol=1e-5)
    assert np.isnan(lowered(ARRAY, -ARRAY)).all()
    slope = jax.jit(jax.grad(lambda *x: lowered(*x).sum(), 1))
    leaf = AT.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(AT, leaf).sum(), leaf)
    np.testing.assert_allclose(slope(ARRAY, ARRAY), expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(slope(ARRAY, -ARRAY)).all()


def test_under_vmap_each_example_has_its_own_answer():
    scales = jnp.stack([ARRAY, ARRAY.at[1].set(-1)])
    out = jax.vmap(to_jax(normal), (None, 0))(ARRAY, scales)
    assert np.isnan(out).tolist() == [False, True]


CHECKED = {
    "multivariate normal": lambda x: td.MultivariateNormal(x, torch.diag(x)).log_prob(x),
    "a sample out of support": lambda x: td.Dirichlet(x).log_prob(x),
    "discrete": lambda x: td.Categorical(probs=x).log_prob(torch.tensor(1)),
    "divergence": lambda x: td.kl_divergence(td.Gamma(x, x), td.Gamma(x + 1, x)).sum(),
    "mixture": lambda x: td.MixtureSameFamily(td.Categorical(x), td.Normal(x, x)).log_prob(x).sum(),
    "transformed": lambda x: td.LogNormal(x, x).log_prob(x).sum(),
}


@pytest.mark.parametrize("name", CHECKED)
def test_whatever_is_checked(name):
    f = CHECKED[name]
    np.testing.assert_allclose(to_jax(f)(ARRAY), f(AT), rtol=2e-5)
    assert np.isnan(to_jax(f)(ARRAY * jnp.asarray([-1, 1, 1]))).all()


class Asking(td.constraints.Constraint):
    def check(self, value):
        return torch.tensor(bool((value > 0).all()))


class Own(td.Normal):
    arg_constraints = {"scale": Asking()}  # noqa: RUF012


@pytest.mark.parametrize(
    "f",
    [
        lambda x: td.VonMises(x, x).sample(),  # until every draw is accepted
        lambda x: Own(x, x).log_prob(x),  # the user's code wants to know
    ],
)
def test_other_questions_are_refused(f):
    with pytest.raises(LoweringError, match="Python number"):
        to_jax(f, rng=True)(jax.random.key(0), ARRAY)
