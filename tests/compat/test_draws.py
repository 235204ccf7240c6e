"""Random numbers from keys: fresh, repeated by a recompute, and different per example."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

import functx
from functx._errors import LoweringError
from functx.compat import to_jax

from .networks import count_dots

KEY = jax.random.key(3)
X = jnp.linspace(0.1, 1.0, 64)


def region(x):
    return functx.remat(lambda x: dropout(torch.sin(x), 0.5))(x).sum()


def kept_of(gradient, x=X):
    """Which elements a mask kept, from a gradient that has to be 2 cos where it did."""
    kept = np.asarray(gradient) != 0
    np.testing.assert_allclose(
        np.asarray(gradient)[kept],
        2 * np.cos(np.broadcast_to(x, kept.shape))[kept],
        rtol=1e-5,
    )
    return kept


def test_a_key_is_needed():
    with pytest.raises(LoweringError, match="rng=True"):
        to_jax(region)(X)
    with pytest.raises(TypeError, match=r"jax\.random key"):
        to_jax(region, rng=True)(X)


def test_draws_differ_between_operations():
    a, b = to_jax(lambda x: (dropout(x, 0.5), dropout(x, 0.5)), rng=True)(KEY, X)
    assert (a != b).any()


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(3)])
def test_equal_keys_give_equal_draws(key):
    h = to_jax(region, rng=True)
    assert h(key, X) == h(key, X) == jax.jit(h)(key, X) == h(X, rng=key)
    assert h(key, X) != h(jax.random.fold_in(key, 1), X)


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


def test_a_recompute_of_a_graph_that_was_traced_twice():
    """Writes need a second pass over the graph; the draws keep their numbers."""

    def f(x):
        def body(z):
            z = z * 1
            z.mul_(2)
            return dropout(z, 0.5)

        z = functx.remat(body)(functx.remat(body)(x))
        z = z.clone()
        z[0] = 1.0
        return (z * x).sum()

    by_jax = jax.grad(to_jax(f, rng=True), 1)(KEY, X)
    inside = to_jax(functx.grad(f), rng=True)(KEY, X)
    np.testing.assert_allclose(by_jax, inside, rtol=1e-6)
    assert 20 < (np.asarray(by_jax)[1:] == 0).sum() < 60


def test_the_recompute_survives_xla():
    w = jnp.eye(8)

    def f(w, x):
        for _ in range(3):
            x = functx.remat(lambda w, x: dropout(torch.tanh(x @ w), 0.5))(w, x)
        return (x * x).sum()

    args = (KEY, w, jnp.ones((4, 8)))
    plain = 3 + 3 + 2
    assert count_dots(jax.grad(to_jax(f, rng=True), 1), *args) == plain + 3
    assert count_dots(to_jax(functx.grad(f), rng=True), *args) == plain + 3


def test_per_example_keys():
    gradient = jax.grad(to_jax(region, rng=True), 1)
    kept = kept_of(jax.vmap(gradient, (0, None))(jax.random.split(KEY, 3), X))
    assert len({row.tobytes() for row in kept}) == 3
    one = kept_of(gradient(jax.random.split(KEY, 3)[1], X))
    np.testing.assert_array_equal(kept[1], one)


def test_randomness_of_a_vmap_inside():
    def rows(randomness):
        return lambda x: functx.vmap(functx.grad(region), randomness=randomness)(x.expand(3, 64))

    different = kept_of(to_jax(rows("different"), rng=True)(KEY, X))
    assert len({row.tobytes() for row in different}) == 3
    same = kept_of(to_jax(rows("same"), rng=True)(KEY, X))
    assert len({row.tobytes() for row in same}) == 1
    with pytest.raises(RuntimeError, match="randomness"):
        to_jax(rows("error"), rng=True)(KEY, X)


def test_in_a_scan():
    h = to_jax(lambda x: dropout(x, 0.5), rng=True)
    _, out = jax.lax.scan(lambda c, key: (c, h(key, c)), X, jax.random.split(KEY, 3))
    assert len({np.asarray(row).tobytes() for row in out}) == 3


def test_generators_of_the_function():
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

    before = torch.get_rng_state(), generator.get_state()
    a, b, c, d, e = to_jax(f, rng=True)(KEY, X)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(c, d)
    assert len({np.asarray(v).tobytes() for v in (a, c, e)}) == 3
    assert torch.equal(before[1], generator.get_state())


def test_tracing_leaves_the_generator_alone():
    before = torch.get_rng_state()
    to_jax(region, rng=True)(KEY, X)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("draw", "names"),
    [
        (random.random, r"Python's random module"),
        (lambda: float(np.random.rand()), r"numpy\.random"),
    ],
)
def test_numbers_that_a_trace_would_freeze_are_refused(draw, names):
    with pytest.raises(LoweringError, match=names):
        to_jax(lambda x: x * draw())(X)


SHAPE = (4, 5)
DRAWS = {
    "rand": lambda x: torch.rand(SHAPE),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(SHAPE),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(3, 9, SHAPE),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randperm": lambda x: torch.randperm(7),
    "bernoulli": torch.bernoulli,
    "bernoulli(p)": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "uniform_": lambda x: x.clone().uniform_(2, 3),
    "normal_": lambda x: x.clone().normal_(2, 3),
    "exponential_": lambda x: x.clone().exponential_(2),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "geometric_": lambda x: x.clone().geometric_(0.3),
    "random_": lambda x: x.clone().random_(10),
    "normal": lambda x: torch.normal(x, 0.1),
    "poisson": lambda x: torch.poisson(3 * x),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "multinomial with replacement": lambda x: torch.multinomial(x, 7, replacement=True),
    "dropout": lambda x: dropout(x, 0.3),
    "dropout2d": lambda x: torch.nn.functional.dropout2d(x.expand(2, 3, 4, 5), 0.3),
    "alpha_dropout": lambda x: torch.nn.functional.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: torch.nn.functional.feature_alpha_dropout(
        x.expand(2, 3, 4, 5), 0.3, training=True
    ),
    "rrelu": lambda x: torch.nn.functional.rrelu(x - 0.5, training=True),
    "gumbel_softmax": lambda x: torch.nn.functional.gumbel_softmax(x),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        *[x.reshape(1, 4, 5)] * 3, dropout_p=0.3
    ),
    "Normal.rsample": lambda x: torch.distributions.Normal(x, x + 1).rsample(),
    "Categorical": lambda x: torch.distributions.Categorical(x).sample(),
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
    a, b = np.sort(got.ravel()), np.sort(expected.numpy().ravel())
    both = np.concatenate([a, b])
    ranks = [np.searchsorted(v, both, side="right") / len(v) for v in (a, b)]
    assert np.abs(ranks[0] - ranks[1]).max() < 0.06  # Kolmogorov and Smirnov's distance
