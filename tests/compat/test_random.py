"""``functx.compat.random`` is ``jax.random``: bit for bit, or within the ulp it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from functx.compat import random

from .draws import FLOATS, keys_same, same, torch_dtype
from .networks import as_usual

quick = settings(max_examples=8, deadline=None)
seeds = st.integers(0, 2**31 - 1)
# Few, since JAX compiles a draw of each.
shapes = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 1, 6)])


@quick
@given(st.integers(0, 2**32 - 1))
def test_key(seed):
    with jax.enable_x64(True):
        keys_same(random.key(seed), jax.random.key(seed))
    if seed < 2**31:
        keys_same(random.key(seed), jax.random.key(seed))


@quick
@given(st.integers(-(2**63), 2**63 - 1))
@example(-1)
@example(2**40 + 3)
def test_key_of_64_bits(seed):
    with jax.enable_x64(True):
        keys_same(random.key(seed), jax.random.key(seed))
        keys_same(random.key(torch.tensor(seed)), jax.random.key(seed))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_key_of_a_tensor(dtype):
    with jax.enable_x64(True):
        for seed in (3, -3 if dtype[0] == "i" else 5):
            ours = random.key(torch.tensor(seed, dtype=torch_dtype(dtype)))
            keys_same(ours, jax.random.key(jnp.asarray(seed, dtype)))


@quick
@given(seeds, st.one_of(st.sampled_from([0, 1, 9]), shapes))
def test_split(seed, num):
    keys_same(random.split(random.key(seed), num), jax.random.split(jax.random.key(seed), num))


@quick
@given(seeds, st.integers(0, 2**32 - 1))
@example(0, 2**32 - 1)
def test_fold_in(seed, data):
    expected = jax.random.fold_in(jax.random.key(seed), np.uint32(data))
    keys_same(random.fold_in(random.key(seed), data), expected)
    keys_same(random.fold_in(random.key(seed), torch.tensor(data)), expected)


@quick
@given(seeds, shapes, st.sampled_from(["uint8", "uint16", "uint32", "uint64"]))
def test_bits(seed, shape, dtype):
    with jax.enable_x64(True):
        expected = jax.random.bits(jax.random.key(seed), shape, dtype)
    same(random.bits(random.key(seed), shape, torch_dtype(dtype)), expected)


def test_bits_default_dtype():
    same(random.bits(random.key(1), (5,)), jax.random.bits(jax.random.key(1), (5,)))


@quick
@given(seeds, shapes, st.sampled_from(FLOATS))
def test_uniform(seed, shape, dtype):
    with jax.enable_x64(True):
        expected = jax.random.uniform(jax.random.key(seed), shape, dtype)
    same(random.uniform(random.key(seed), shape, torch_dtype(dtype)), expected)


bounds = st.floats(-100, 100, allow_subnormal=False, width=32)


@quick
@given(seeds, st.sampled_from(FLOATS), bounds, bounds)
@example(0, "float32", 0.3, 1.7)
@example(0, "float64", 0.3, 1.7)
@example(0, "float16", -3.0, 0.0)
@example(0, "bfloat16", -3.0, 0.0)
def test_uniform_between_bounds(seed, dtype, low, high):
    with jax.enable_x64(True):
        draw = as_usual(lambda *args: jax.random.uniform(args[0], (300,), dtype, *args[1:]))
        expected = draw(jax.random.key(seed), low, high)
    same(random.uniform(random.key(seed), (300,), torch_dtype(dtype), low, high), expected)


def test_uniform_between_tensors():
    low, high = np.linspace(-3, 0, 5, dtype="float32"), np.linspace(0.1, 9, 4, dtype="float32")
    draw = as_usual(
        lambda *args: jax.random.uniform(args[0], (4, 5), minval=args[1], maxval=args[2])
    )
    expected = draw(jax.random.key(2), low, high[:, None])
    low, high = torch.tensor(low), torch.tensor(high)[:, None]
    same(random.uniform(random.key(2), (4, 5), minval=low, maxval=high), expected)


def test_uniform_is_differentiable_in_its_bounds():
    def draw(low, high):
        return random.uniform(random.key(0), (50,), torch.float64, low, high).sum()

    ours = torch.func.grad(draw, (0, 1))(*torch.tensor([0.3, 1.7], dtype=torch.float64))
    unit = random.uniform(random.key(0), (50,), torch.float64)
    torch.testing.assert_close(ours, ((1 - unit).sum(), unit.sum()))


@quick
@given(seeds, st.floats(0, 1), st.sampled_from(["low", "high"]))
def test_bernoulli(seed, p, mode):
    expected = jax.random.bernoulli(jax.random.key(seed), p, (300,), mode=mode)
    same(random.bernoulli(random.key(seed), p, (300,), mode=mode), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bernoulli_of_a_tensor(dtype):
    p = torch.linspace(0, 1, 64, dtype=torch_dtype(dtype))
    with jax.enable_x64(True):
        theirs = jnp.asarray(p.double().numpy()).astype(dtype)
        same(random.bernoulli(random.key(3), p), jax.random.bernoulli(jax.random.key(3), theirs))
        expected = jax.random.bernoulli(jax.random.key(3), theirs, (5, 64))
    same(random.bernoulli(random.key(3), p, (5, 64)), expected)


@quick
@given(seeds, shapes)
def test_rademacher(seed, shape):
    expected = jax.random.rademacher(jax.random.key(seed), shape, "int32")
    same(random.rademacher(random.key(seed), shape), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9999999, 1.0])
@pytest.mark.parametrize("broadcast_dims", [(), (0,), (-1,)])
def test_dropout_is_that_of_flax(dtype, p, broadcast_dims):
    """Flax's own lines: a mask from ``bernoulli``, kept inputs divided by their probability."""
    x = torch.randn(40, 5).to(torch_dtype(dtype))
    ours = random.dropout(random.key(4), x, p, broadcast_dims=broadcast_dims)
    with jax.enable_x64(True):
        theirs = jnp.asarray(x.double().numpy()).astype(dtype)
        expected = flax_dropout(jax.random.key(4), theirs, p, broadcast_dims)
    same(ours, expected)
    assert random.dropout(random.key(4), x, p, training=False) is x


def flax_dropout(key, x, rate, broadcast_dims):
    if rate in (0.0, 1.0):
        return x if rate == 0.0 else jnp.zeros_like(x)
    keep = 1.0 - rate
    shape = list(x.shape)
    for axis in broadcast_dims:
        shape[axis] = 1
    mask = jnp.broadcast_to(jax.random.bernoulli(key, np.float32(keep), shape), x.shape)
    return jax.lax.select(mask, x / keep, jnp.zeros_like(x))


integers = ["int8", "int16", "int32", "int64", "uint8"]


@quick
@given(st.data(), seeds, st.sampled_from(integers))
def test_randint(data, seed, dtype):
    info = np.iinfo(dtype)
    edges = st.sampled_from([info.min, info.min + 1, 0, 1, info.max - 1, info.max])
    numbers = st.one_of(edges, st.integers(int(info.min), int(info.max)))
    low, high = int(data.draw(numbers)), int(data.draw(numbers))
    high += data.draw(st.booleans()) and info.bits < 64
    with jax.enable_x64(True):
        expected = jax.random.randint(jax.random.key(seed), (40,), low, high, dtype)
    same(random.randint(random.key(seed), (40,), low, high, torch_dtype(dtype)), expected)


@pytest.mark.parametrize("dtype", integers)
def test_randint_of_everything(dtype):
    info = np.iinfo(dtype)
    most = int(info.max) + (info.bits < 64)
    with jax.enable_x64(True):
        expected = jax.random.randint(jax.random.key(0), (99,), int(info.min), most, dtype)
    same(random.randint(random.key(0), (99,), int(info.min), most, torch_dtype(dtype)), expected)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_randint_between_tensors(dtype):
    low = torch.tensor([0, -5, 7, 3])
    high = torch.tensor([[4], [100 if dtype == "int8" else 2**31], [0]])
    with jax.enable_x64(True):
        key = jax.random.key(7)
        expected = jax.random.randint(key, (3, 4), low.numpy(), high.numpy(), dtype)
    same(random.randint(random.key(7), (3, 4), low, high, torch_dtype(dtype)), expected)


def test_randint_default_dtype():
    expected = jax.random.randint(jax.random.key(1), (5,), 0, 10)
    same(random.randint(random.key(1), (5,), 0, 10), expected)


@quick
@given(seeds, st.sampled_from([0, 1, 2, 40]))
def test_permutation_of_a_range(seed, n):
    with jax.enable_x64(True):
        expected = jax.random.permutation(jax.random.key(seed), n)
    same(random.permutation(random.key(seed), n), expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("independent", [False, True])
def test_permutation_of_a_tensor(axis, independent):
    x = torch.randn(5, 6, 3)
    expected = jax.random.permutation(jax.random.key(1), x.numpy(), axis, independent)
    same(random.permutation(random.key(1), x, axis, independent), expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_categorical(axis):
    logits = torch.randn(4, 5, 6)
    own = tuple(np.delete(logits.shape, axis).tolist())
    for shape in (None, own, (3, *own)):
        with jax.enable_x64(True):
            theirs = jax.random.categorical(jax.random.key(2), logits.numpy(), axis, shape)
        same(random.categorical(random.key(2), logits, axis, shape), theirs)
    with jax.enable_x64(True):
        expected = jax.random.categorical(
            jax.random.key(2), logits.numpy(), axis, (3, *own), replace=False
        )
    ours = random.categorical(random.key(2), logits, axis, (3, *own), replace=False)
    np.testing.assert_array_equal(ours, expected)


def test_keys_go_to_jax_and_back():
    keys = random.split(random.key(9), (2, 3))
    typed = random.to_jax(keys)
    assert typed.shape == (2, 3)
    assert torch.equal(random.from_jax(typed), keys)
    assert torch.equal(random.from_jax(jax.random.PRNGKey(9)), random.key(9))
    assert torch.equal(random.wrap_key_data(np.asarray(jax.random.key_data(typed))), keys)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_keys_in_other_dtypes(dtype):
    key = random.split(random.key(3))[1]
    other = key.to(dtype)
    assert torch.equal(random.uniform(other, (9,)), random.uniform(key, (9,)))
    for make in (random.split, lambda k: random.fold_in(k, 5)):
        made = make(other)
        assert made.dtype == dtype
        assert torch.equal(random.wrap_key_data(made), make(key))


def test_a_draw_does_not_depend_on_its_shape():
    flat = random.bits(random.key(0), (24,))
    assert torch.equal(random.bits(random.key(0), (2, 3, 4)), flat.reshape(2, 3, 4))
    assert torch.equal(random.bits(random.key(0), (5,)), flat[:5])


def test_counters_have_64_bits():
    """Positions beyond 2**32 have a high word; hashed here by JAX itself."""
    from jax.extend.random import threefry2x32_p

    from functx.compat._threefry import threefry2x32

    state = np.array([0xDEADBEEF, 5, 3, 0xFFFFFFFF], "uint32")
    a, b = threefry2x32_p.bind(*state)
    k0, k1, high, low = torch.tensor(state.astype("int32"))
    ours = torch.stack(threefry2x32((k0, k1), high, low))
    np.testing.assert_array_equal(ours.numpy().view("uint32"), np.stack([a, b]))


def test_the_generator_of_torch_is_left_alone():
    before = torch.get_rng_state()
    key = random.key(0)
    random.normal(key, (3,)), random.permutation(key, 9), random.dropout(key, torch.ones(3))
    assert torch.equal(before, torch.get_rng_state())
