"""Draws from keys under every transform and in JAX; errors that say what was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from functx.compat import random, to_jax

from ..helpers import as_usual
from .test_bits import DRAWS as BITS
from .test_bits import JAX, TORCH

# Beside those of `test_bits`, which has them unbatched.
DRAWS = {
    "uniform": lambda of, key: of.uniform(key, (3,)),
    "split then draw": lambda of, key: of.uniform(of.fold_in(of.split(key)[1], 3)),
    "permutation": lambda of, key: of.permutation(key, of.array(np.arange(7, dtype="int32"))),
    "normal": lambda of, key: of.normal(key, (3,)),
}
REST = ("bits ((7,), 'uint8')", "uniform between ('float32', 0.3, 1.7)", "randint")
ours = lambda name: lambda key: (DRAWS | BITS)[name](TORCH, key)
theirs = lambda name: lambda key: (DRAWS | BITS)[name](JAX, key)


def agree(name, got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    if name == "normal":
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "name", [*DRAWS, *(pytest.param(name, marks=pytest.mark.sweep) for name in REST)]
)
def test_a_draw_is_that_of_jax_batched_traced_and_lowered(name):
    keys = random.split(random.key(1), (2, 3))
    typed = random.to_jax(keys)
    nested = as_usual(jax.vmap(jax.vmap(theirs(name))))(typed)
    agree(name, torch.vmap(torch.vmap(ours(name)))(keys), nested)
    agree(name, make_fx(ours(name))(keys[0, 0])(keys[1, 1]), nested[1, 1])
    lowered, plain = to_jax(ours(name)), jax.vmap(theirs(name))(typed[1])
    agree(name, lowered(jax.random.key_data(typed[1, 0])), plain[0])
    agree(name, jax.jit(jax.vmap(lowered))(typed[1]), plain)


def test_batched_seeds_and_data_are_those_of_jax():
    data = torch.tensor([0, 5, 2**32 - 1])
    got = torch.vmap(random.fold_in, (None, 0))(random.key(3), data)
    expected = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(3), data.numpy().astype("uint32")
    )
    agree("", random.key_data(got), jax.random.key_data(expected))
    got = torch.vmap(random.key)(torch.arange(4))
    agree("", random.key_data(got), jax.random.key_data(jax.vmap(jax.random.key)(np.arange(4))))


def test_a_lowered_function_may_have_a_key_of_its_own():
    lowered = to_jax(lambda x: x * random.uniform(random.fold_in(random.key(5), 1), (3,)))
    expected = jax.random.uniform(jax.random.fold_in(jax.random.key(5), 1), (3,))
    agree("", lowered(jnp.ones(3)), expected)
    closed_over = random.split(random.key(5))[1]
    with jax.enable_x64(True):
        got = to_jax(lambda x: x * random.uniform(closed_over, (3,)))(jnp.ones(3, "float32"))
    agree("", got, jax.random.uniform(jax.random.split(jax.random.key(5))[1], (3,)))
    with pytest.raises(TypeError, match="key of rbg"):
        to_jax(random.split)(jax.random.key(0, impl="rbg"))


@pytest.mark.sweep  # the compiler takes seconds
def test_draws_compile_without_a_graph_break():
    def f(key, x):
        first, second = random.split(key).unbind(0)
        return random.dropout(first, x, 0.3), random.normal(second, (5,)), random.bits(second)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        key, x = random.key(seed), torch.randn(6)
        for a, b in zip(compiled(key, x), f(key, x)):
            assert torch.equal(a, b)


KEY = random.key(0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: random.key(0.5), TypeError, "integer seed, not float"),
        (lambda: random.key(2**64), OverflowError, "more than 64 bits"),
        (lambda: random.key(torch.ones(2)), TypeError, "use vmap for many seeds"),
        (lambda: random.split(0), TypeError, r"random.key\(seed\)"),
        (lambda: random.split(jax.random.key(0)), TypeError, "random.from_jax"),
        (lambda: random.uniform(torch.tensor([1, 2, 3])), TypeError, "two integer words"),
        (lambda: random.uniform(random.split(KEY)), ValueError, "use vmap"),
        (lambda: random.uniform(KEY, 3), TypeError, r"such as \(3,\), not 3"),
        (lambda: random.uniform(KEY, (-1,)), ValueError, "negative"),
        (lambda: random.uniform(KEY, (), torch.int32), ValueError, "not torch.int32"),
        (lambda: random.uniform(KEY, (3,), minval=torch.zeros(2)), ValueError, "broadc"),
        (lambda: random.bernoulli(KEY, 1), TypeError, "floating point probability, not int"),
        (lambda: random.dropout(KEY, torch.ones(2), 2.0), ValueError, "is not a probability"),
        (lambda: random.uniform(KEY, np.int64(3)), TypeError, r"such as \(3,\), not np.int64"),
        (lambda: random.uniform(KEY, np.ones(2)), TypeError, "a size that is not an integer"),
        (lambda: random.permutation(KEY, 10, axis=3), IndexError, "axis 3 of a tensor with 1 axes"),
        (lambda: random.permutation(KEY, torch.ones(2, 2), 2), IndexError, "permutation: axis 2"),
        (lambda: random.gumbel(KEY, mode="x"), ValueError, "gumbel: mode must be 'low' or 'high'"),
        (lambda: random.categorical(KEY, torch.ones(3), mode="x"), ValueError, "categorical: mode"),
        (lambda: random.bernoulli(KEY, 0.5, mode="x"), ValueError, "bernoulli: mode"),
        (lambda: random.randint(KEY, (), 0, 2, torch.float32), TypeError, "float32"),
        (
            lambda: random.randint(KEY, (), 0.0, 2),
            TypeError,
            "must be integers, got a float",
        ),
        (lambda: random.categorical(KEY, torch.ones(3), 1), IndexError, "axis 1"),
        (
            lambda: random.categorical(KEY, torch.ones(3), 0, (4,), replace=False),
            ValueError,
            "4 dr",
        ),
        (lambda: random.fold_in(KEY, 2**32), OverflowError, "outside"),
        (lambda: random.fold_in(KEY, torch.arange(2)), TypeError, "use vmap"),
        (lambda: random.from_jax(jax.random.key(0, impl="rbg")), TypeError, "rbg"),
    ],
)
def test_wrong_use_says_what_was_given_and_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()
