"""``functx.compat.random`` is ``jax.random``: bit for bit, or within what it promises."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from functx.compat import random

from ..helpers import as_usual

FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
SHAPES = [(), (0,), (7,), (3, 5), (4, 1, 6)]


torch_dtype = lambda name: getattr(torch, name)
numpy_of = lambda x: x.to(torch.float64).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def same(ours, theirs):
    """The same shape, dtype and bits."""
    theirs = np.asarray(theirs)
    assert str(ours.dtype).removeprefix("torch.") == str(theirs.dtype)
    assert tuple(ours.shape) == theirs.shape
    theirs = theirs.astype(np.float64) if str(theirs.dtype) == "bfloat16" else theirs
    np.testing.assert_array_equal(numpy_of(ours), theirs)


def keys_same(ours, theirs):
    theirs = jax.random.key_data(theirs)
    same(random.key_data(ours), theirs)


TORCH = SimpleNamespace(**vars(random), dtype=torch_dtype, array=torch.tensor)
JAX = SimpleNamespace(**vars(jax.random), dtype=jnp.dtype, array=lambda x: x)
LOW, HIGH = np.float32([-3.0, -1.5, 0.25]), np.float32([[0.5], [9.0]])
LEAST, MOST = np.array([0, -5, 7, 3]), np.array([[4], [2**31], [0]])
LOGITS = np.random.default_rng(0).normal(size=(4, 5, 6)).astype("float32")
PERHAPS = np.linspace(0, 1, 64, dtype="float32")


def bounds(dtype):
    info = np.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    return [(low, high + (info.bits < 64)), (low + 1, 1), (0, high), (5, 5), (7, 3), (0, 10)]


# Of the torch or the JAX library, and its arrays and dtypes.
DRAWS = {
    "split": lambda of, key: of.key_data(of.split(key, 9)),
    "split by shape": lambda of, key: of.key_data(of.split(key, (2, 0, 3))),
    "rademacher of uint32": lambda of, key: of.rademacher(key, (9,), of.dtype("uint32")),
    "rademacher of bool": lambda of, key: of.rademacher(key, (9,), of.dtype("bool")),
    "rademacher": lambda of, key: of.rademacher(key, (3, 5), of.dtype("int32")),
    "uniform between tensors": lambda of, key: of.uniform(
        key, (2, 3), minval=of.array(LOW), maxval=of.array(HIGH)
    ),
    "bernoulli of a tensor": lambda of, key: of.bernoulli(key, of.array(PERHAPS), (5, 64)),
    "randint": lambda of, key: of.randint(key, (5,), 0, 10),
    "randint between tensors": lambda of, key: of.randint(
        key, (3, 4), of.array(LEAST), of.array(MOST), of.dtype("int64")
    ),
}


def add(name, draw, cases):
    DRAWS.update({f"{name} {c}": lambda of, key, c=c: draw(of, key, *c) for c in cases})


add(
    "bits",
    lambda of, key, shape, dtype: of.bits(key, shape, of.dtype(dtype)),
    [*((shape, "uint32") for shape in SHAPES), *(((7,), f"uint{n}") for n in (8, 16, 64))],
)
add(
    "uniform",
    lambda of, key, dtype, shape: of.uniform(key, shape, of.dtype(dtype)),
    [(dtype, SHAPES[i]) for i, dtype in enumerate(FLOATS)],
)
add(
    "uniform between",
    lambda of, key, dtype, low, high: of.uniform(key, (300,), of.dtype(dtype), low, high),
    [(dtype, *([-3.0, 0.0] if "16" in dtype else [0.3, 1.7])) for dtype in FLOATS],
)
add(
    "bernoulli",
    lambda of, key, p, mode: of.bernoulli(key, p, (300,), mode=mode),
    [(0.0, "low"), (0.3, "low"), (0.7, "high"), (1.0, "low")],
)
add(
    "randint",
    lambda of, key, dtype, low, high: of.randint(key, (40,), low, high, of.dtype(dtype)),
    [(d, low, high) for i, d in enumerate(INTEGERS) for low, high in bounds(d)[i % 2 :: 2]],
)
add("permutation", lambda of, key, n: of.permutation(key, n), [(0,), (1,), (40,)])
add(
    "permutation of a tensor",
    lambda of, key, axis, independent: of.permutation(key, of.array(LOGITS), axis, independent),
    [(0, False), (1, True), (-1, False)],
)
add(
    "categorical in mode",
    lambda of, key, mode, replace: of.categorical(
        key, of.array(LOGITS), 0, (3, 5, 6), replace=replace, mode=mode
    ),
    [(mode, replace) for mode in ("low", "high") for replace in (True, False)],
)
add("gumbel of bfloat16", lambda of, key, mode: of.gumbel(key, (99,), of.dtype("bfloat16"), mode),
    [(None,), ("low",), ("high",)])  # fmt: skip
add(
    "keys by sizes of NumPy",
    lambda of, key, name, n: of.key_data(getattr(of, name)(key, n)),
    [("split", np.int64(4)), ("split", (np.int32(2), 3)), ("fold_in", np.uint32(9))],
)
add(
    "sizes of NumPy",
    lambda of, key, name, *args: getattr(of, name)(key, *args),
    [("uniform", (np.int64(3), np.uint8(2))), ("uniform", np.array([2, 3])),
     ("permutation", np.int16(7)), ("permutation", 7, np.int64(-1)), ("bernoulli", np.float32(0.3)),
     ("randint", (np.int64(5),), np.int8(-3), np.uint16(40))],
)  # fmt: skip
add(
    "categorical",
    lambda of, key, axis, shape, replace=True: of.categorical(
        key, of.array(LOGITS), axis, shape, **({} if replace else {"replace": False})
    ),
    [(0, None), (-1, (4, 5)), (1, (3, 4, 6)), (0, (3, 5, 6), False)],
)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_that_of_jax_and_leaves_torch_s_generator_alone(name):
    before = torch.get_rng_state()
    for seed in (0, 2**31 - 1):
        wide = any(word in name for word in ("64", "permutation", "categorical"))
        wide &= "sizes" not in name or "permutation" in name
        with jax.enable_x64(wide or ("tensors" in name and "randint" in name)):
            draw = lambda key: DRAWS[name](JAX, key)
            expected = (as_usual(draw) if "between" in name else draw)(jax.random.key(seed))
        ours = DRAWS[name](TORCH, random.key(seed))
        if "between ('float16'" in name:  # within a rounding of the lower bound
            np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=2**-9)
        elif "replace" in name or (name.endswith("False)") and "categorical" in name):
            np.testing.assert_array_equal(ours, expected)
        else:
            same(ours, expected)
    assert torch.equal(before, torch.get_rng_state())


@settings(max_examples=6, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1))
@example(-1, 0)
@example(5, 2**32 - 1)
def test_a_key_and_fold_in_are_those_of_jax(seed, data):
    with jax.enable_x64(True):
        keys_same(random.key(seed), jax.random.key(seed))
        keys_same(random.key(torch.tensor(seed)), jax.random.key(seed))
        for dtype in (torch.uint8, torch.int16):
            narrow = torch.tensor(seed).to(dtype)
            keys_same(random.key(narrow), jax.random.key(jnp.asarray(narrow.numpy())))
    seed %= 2**31
    keys_same(random.key(seed), jax.random.key(seed))
    expected = jax.random.fold_in(jax.random.key(seed), np.uint32(data))
    keys_same(random.fold_in(random.key(seed), data), expected)
    keys_same(random.fold_in(random.key(seed), torch.tensor(data)), expected)


@pytest.mark.parametrize(
    ("dtype", "p", "broadcast_dims"),
    [
        ("float16", 0.1, ()),
        ("bfloat16", 0.5, (0,)),
        ("float32", 0.9999999, (-1,)),
        ("float64", 0.5, ()),
        ("float32", 0.0, ()),
        ("float32", 1.0, (0,)),
    ],
)
def test_dropout_is_that_of_flax(dtype, p, broadcast_dims):
    x = torch.randn(40, 5).to(torch_dtype(dtype))
    ours = random.dropout(random.key(4), x, p, broadcast_dims=broadcast_dims)
    with jax.enable_x64(True):
        theirs = jnp.asarray(x.double().numpy()).astype(dtype)
        expected = flax_dropout(jax.random.key(4), theirs, p, broadcast_dims)
    same(ours, expected)
    assert random.dropout(random.key(4), x, p, training=False) is x


def flax_dropout(key, x, rate, broadcast_dims=()):
    """Flax's own lines: a mask from ``bernoulli``, kept inputs divided by their probability."""
    if rate in (0.0, 1.0):
        return x if rate == 0.0 else jnp.zeros_like(x)
    keep = 1.0 - rate
    shape = list(x.shape)
    for axis in broadcast_dims:
        shape[axis] = 1
    mask = jnp.broadcast_to(jax.random.bernoulli(key, np.float32(keep), shape), x.shape)
    return jax.lax.select(mask, x / keep, jnp.zeros_like(x))


def test_keys_go_to_jax_and_back():
    keys = random.split(random.key(9), (2, 3))
    typed = random.to_jax(keys)
    assert typed.shape == (2, 3)
    assert torch.equal(random.from_jax(typed), keys)
    assert torch.equal(random.from_jax(jax.random.PRNGKey(9)), random.key(9))
    assert torch.equal(random.wrap_key_data(np.asarray(jax.random.key_data(typed))), keys)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_a_key_may_have_another_dtype(dtype):
    key = random.split(random.key(3))[1]
    other = key.to(dtype)
    assert torch.equal(random.uniform(other, (9,)), random.uniform(key, (9,)))
    for make in (random.split, lambda k: random.fold_in(k, 5)):
        made = make(other)
        assert made.dtype == dtype
        assert torch.equal(random.wrap_key_data(made), make(key))


CONTINUOUS = [
    *[("normal", dtype) for dtype in FLOATS],
    *[(name, dtype) for name in ("exponential", "gumbel", "gumbel high") for dtype in FLOATS[2:]],
]


TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 2e-12}


@pytest.mark.parametrize(("name", "dtype"), CONTINUOUS)
def test_a_continuous_draw_is_within_what_is_promised(name, dtype):
    name, *mode = name.split()
    options = {"shape": (50_000,), **({"mode": "high"} if mode else {})}
    with jax.enable_x64(True):
        draw = lambda *args: getattr(jax.random, name)(*args, dtype=dtype, **options)
        expected = draw(jax.random.key(6))
    draw = getattr(random, name)
    ours = draw(random.key(6), dtype=torch_dtype(dtype), **options)
    assert str(ours.dtype).removeprefix("torch.") == dtype == str(expected.dtype)
    expected = np.asarray(expected).astype("float64")
    few_ulp = name == "gumbel" and (not mode or dtype == "float32")
    rtol = 4 * np.finfo(dtype).eps if few_ulp else TOLERANCE[dtype]
    apart = np.abs(ours.double().numpy() - expected)
    assert (apart <= rtol * np.maximum(np.abs(expected), 1)).all()


TAILS = [
    line.split("|")[1:-1]
    for line in random.__doc__.splitlines()
    if re.match(r"\| -?\d and \d", line)
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("row", TAILS, ids=lambda row: row[0].strip())
def test_a_truncated_normal_draw_is_within_what_the_table_says(row, dtype):
    low, high = map(float, row[0].split(" and "))
    bound = float(row[1 + FLOATS.index(dtype)])
    with jax.enable_x64(True):
        draw = lambda key, *args: jax.random.truncated_normal(key, *args, (9_999,), dtype)
        for bounds in ((low, high), (-high, -low)):
            compiled = as_usual(lambda key, bounds=bounds: draw(key, *bounds))
            expected = np.asarray(compiled(jax.random.key(6))).astype("float64")
            ours = random.truncated_normal(random.key(6), *bounds, (9_999,), torch_dtype(dtype))
            apart = np.abs(ours.double().numpy() - expected)
            assert (apart <= bound * np.maximum(np.abs(expected), 1)).all()


def test_of_equal_categories_the_first_are_drawn_first():
    """Numbers of 16 bits are often equal; JAX keeps their order."""
    logits = np.random.default_rng(0).normal(size=50).astype("float32")
    for seed in range(5):
        expected = jax.random.categorical(
            jax.random.key(seed), jnp.asarray(logits, "bfloat16"), 0, (40,), False, "high"
        )
        ours = torch.tensor(logits).bfloat16()
        drawn = random.categorical(random.key(seed), ours, 0, (40,), replace=False, mode="high")
        np.testing.assert_array_equal(drawn, expected)
