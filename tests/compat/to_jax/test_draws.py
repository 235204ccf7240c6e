"""Random numbers from keys: fresh, repeated, different per example; distributions' checks."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import distributions as td
from torch.nn import functional
from torch.nn.functional import dropout

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax
from tools.opinfo.to_jax import ks_distance as apart

KEY = jax.random.key(3)
X = jnp.linspace(0.1, 1.0, 64)


def region(x):
    return functx.remat(lambda x: dropout(torch.sin(x), 0.5))(x).sum()


def kept_of(gradient, x=X):
    """Which elements a mask kept, from a gradient that has to be 2 cos where it did."""
    kept = np.asarray(gradient) != 0
    np.testing.assert_allclose(
        np.asarray(gradient)[kept], 2 * np.cos(np.broadcast_to(x, kept.shape))[kept], rtol=1e-5
    )
    return kept


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(3)])
def test_equal_keys_give_equal_draws(key):
    h, before = to_jax(region, rng=True), torch.get_rng_state()
    assert h(key, X) == h(key, X) == jax.jit(h)(key, X) == h(X, rng=key)
    assert h(key, X) != h(jax.random.fold_in(key, 1), X)
    assert torch.equal(before, torch.get_rng_state())


def test_a_recompute_draws_the_same():
    h = to_jax(region, rng=True)
    kept = kept_of(jax.grad(h, 1)(KEY, X))
    assert 10 < kept.sum() < 54
    np.testing.assert_allclose(h(KEY, X), 2 * np.sin(X)[kept].sum(), rtol=1e-5)
    # Where torch takes the gradient, the replay is a region of its own.
    inside = to_jax(functx.grad(region), rng=True)(KEY, X)
    np.testing.assert_array_equal(kept_of(inside), kept)
    plain = to_jax(lambda x: dropout(torch.sin(x), 0.5).sum(), rng=True)
    np.testing.assert_array_equal(kept_of(jax.grad(plain, 1)(KEY, X)), kept)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_attention_counts_as_a_draw_only_where_it_drops_something(rate):
    def block(q):
        return dropout(functional.scaled_dot_product_attention(q, q, q, dropout_p=rate), 0.5).sum()

    q = jnp.linspace(-1, 1, 32).reshape(1, 1, 8, 4)
    plain = to_jax(block, rng=True)
    for cut in (functx.remat(block), lambda q: functx.remat(functx.remat(block))(q)):
        h, inside = to_jax(cut, rng=True), to_jax(functx.grad(cut), rng=True)
        np.testing.assert_allclose(h(KEY, q), plain(KEY, q), rtol=1e-5)
        expected = jax.grad(plain, 1)(KEY, q)
        for gradient in (jax.grad(h, 1)(KEY, q), inside(KEY, q)):
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_each_example_draws_from_its_own_key():
    gradient = jax.grad(to_jax(region, rng=True), 1)
    kept = kept_of(jax.vmap(gradient, (0, None))(jax.random.split(KEY, 3), X))
    assert len({row.tobytes() for row in kept}) == 3
    one = kept_of(gradient(jax.random.split(KEY, 3)[1], X))
    np.testing.assert_array_equal(kept[1], one)


def test_a_vmap_inside_heeds_its_randomness():
    def rows(randomness):
        return lambda x: functx.vmap(functx.grad(region), randomness=randomness)(x.expand(3, 64))

    different = kept_of(to_jax(rows("different"), rng=True)(KEY, X))
    assert len({row.tobytes() for row in different}) == 3
    same = kept_of(to_jax(rows("same"), rng=True)(KEY, X))
    assert len({row.tobytes() for row in same}) == 1
    with pytest.raises(RuntimeError, match="randomness"):
        to_jax(rows("error"), rng=True)(KEY, X)


def test_a_generator_that_is_set_back_draws_the_same_again():
    generator = torch.Generator().manual_seed(1)

    def f(x):
        torch.manual_seed(3)
        a = torch.rand(4)
        torch.manual_seed(3)
        b = torch.rand(4)
        state = generator.get_state()
        c = torch.rand(4, generator=generator)
        generator.set_state(state)
        return a, b, c, torch.rand(4, generator=generator), torch.rand(4)

    before = generator.get_state()
    a, b, c, d, e = to_jax(f, rng=True)(KEY, X)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(c, d)
    assert len({np.asarray(v).tobytes() for v in (a, c, e)}) == 3
    assert torch.equal(before, generator.get_state())


def test_numbers_that_a_trace_would_freeze_are_refused():
    with pytest.raises(LoweringError, match=r"Python's random module"):
        to_jax(lambda x: x * random.random())(X)
    with pytest.raises(LoweringError, match=r"numpy\.random"):
        to_jax(lambda x: x * float(np.random.rand()))(X)


SHAPE = (4, 5)
# Of those that torch's database has, a few: it is compared by distribution too.
DRAWS = {
    "random_": lambda x: x.clone().random_(10),
    "randn": lambda x: torch.randn(SHAPE),
    "randperm": lambda x: torch.randperm(7),
    "normal": lambda x: torch.normal(x, 0.1),
    "poisson": lambda x: torch.poisson(3 * x),
    "attention": lambda x: functional.scaled_dot_product_attention(
        *[x.reshape(1, 4, 5)] * 3, dropout_p=0.3
    ),
    "Gamma": lambda x: torch.distributions.Gamma(x + 1, x + 1).rsample(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_is_distributed_as_torch_s(name):
    f = DRAWS[name]
    x = torch.linspace(0.2, 0.9, 20).reshape(SHAPE)
    h = jax.jit(jax.vmap(to_jax(f, rng=True), (0, None)))
    got = np.asarray(h(jax.random.split(KEY, 300), jnp.asarray(x.numpy())))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = torch.stack([f(x) for _ in range(300)])
    assert got.shape == expected.shape
    assert got.dtype.kind == expected.numpy().dtype.kind
    assert apart(got, expected.numpy()) < 0.06


def test_gumbel_softmax_has_the_gradient_of_the_soft_one():
    """``hard=True`` is one-hot, by a detach inside of torch's function."""
    weight, x = torch.tensor([1.0, 2.0, 4.0]), jnp.asarray([0.3, -0.1, 0.2])
    f = lambda x, hard: (functional.gumbel_softmax(x, hard=hard) * weight).sum()
    gradient = jax.grad(to_jax(f, rng=True), 1)
    np.testing.assert_allclose(gradient(KEY, x, True), gradient(KEY, x, False))
    assert np.abs(gradient(KEY, x, True)).max() > 0.01
    inside = to_jax(functx.grad(f), rng=True)(KEY, x, True)
    np.testing.assert_allclose(inside, gradient(KEY, x, True), rtol=1e-6)
    assert float(to_jax(f, rng=True)(KEY, x, True)) in (1.0, 2.0, 4.0)


def test_a_normal_number_has_no_derivative_in_its_mean_and_deviation():
    f = lambda mean, deviation: torch.normal(mean, deviation).sum() + mean.sum()
    got = jax.grad(to_jax(f, rng=True), (1, 2))(KEY, jnp.ones(3), jnp.ones(3))
    assert [g.tolist() for g in got] == [[1, 1, 1], [0, 0, 0]]


AT = torch.tensor([0.2, 0.3, 0.5])
ARRAY = jnp.asarray(AT.numpy())


normal = lambda loc, scale: td.Normal(loc, scale).log_prob(torch.tensor(0.4)).sum()
gradient = lambda loc, scale: functx.grad(functx.remat(normal), 1)(loc, scale)


@pytest.fixture(autouse=True)
def _arguments_are_checked():
    """As by default: a function that was compiled before in this process has turned it off."""
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.mark.parametrize(
    "f", [lambda loc, scale: functx.remat(normal)(2 * loc, scale) + loc.sum(), gradient]
)
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


def test_a_check_of_all_values_makes_results_nan_where_it_fails():
    def f(x):
        torch._check_tensor_all_with(ValueError, x > 0, lambda: "positive")
        return x.log()

    assert np.isfinite(jax.jit(to_jax(f))(ARRAY)).all()
    assert np.isnan(jax.jit(to_jax(f))(-ARRAY)).all()


class Asking(td.constraints.Constraint):
    def check(self, value):
        return torch.tensor(bool((value > 0).all()))


class Own(td.Normal):
    arg_constraints = {"scale": Asking()}  # noqa: RUF012


def test_a_check_that_python_reads_is_refused():
    sampled = lambda x: td.VonMises(x, x).sample()  # until every draw is accepted
    for f in (sampled, lambda x: Own(x, x).log_prob(x)):
        with pytest.raises(LoweringError, match="Python number"):
            to_jax(f, rng=True)(jax.random.key(0), ARRAY)
