"""Draws from keys under every transform: per key, repeated by a replay, compiled, and in JAX."""

import gc
import shutil
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import functx
from functx.compat import _fused, random, to_jax
from functx.compat._fused import multiply_add

from .networks import as_usual, assert_close

DRAWS = {
    "bits": lambda key, of: of.bits(key, (3,), of.uint8),
    "uniform": lambda key, of: of.uniform(key, (3,)),
    "uniform between bounds": lambda key, of: of.uniform(key, (3,), minval=0.3, maxval=1.7),
    "bernoulli": lambda key, of: of.bernoulli(key, 0.3, (4,)),
    "bernoulli high": lambda key, of: of.bernoulli(key, 0.3, (4,), mode="high"),
    "split": lambda key, of: of.key_data(of.split(key, (2, 3))),
    "fold_in": lambda key, of: of.key_data(of.fold_in(key, 7)),
    "split then draw": lambda key, of: of.uniform(of.fold_in(of.split(key)[1], 3), (2,)),
    "randint": lambda key, of: of.randint(key, (5,), -3, 100),
    "permutation": lambda key, of: of.permutation(key, of.arange(7)),
    "normal": lambda key, of: of.normal(key, (3,)),
    "scalar": lambda key, of: of.uniform(key),
    "empty": lambda key, of: of.uniform(key, (0, 2)),
}


class Torch:
    """``functx.compat.random`` and the few other names that `DRAWS` use."""

    uint8 = torch.uint8
    arange = staticmethod(lambda n: torch.arange(n, dtype=torch.int32))

    def __getattr__(self, name):
        return getattr(random, name)


class Jax:
    uint8 = jnp.uint8
    arange = staticmethod(jnp.arange)

    def __getattr__(self, name):
        return getattr(jax.random, name)


def ours(name):
    return lambda key: DRAWS[name](key, Torch())


def theirs(name):
    return lambda key: DRAWS[name](key, Jax())


def agree(name, got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    if name == "normal":
        np.testing.assert_array_max_ulp(got, expected, 3)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_is_that_of_jax(name):
    keys = random.split(random.key(1), (2, 3))
    typed = random.to_jax(keys)
    agree(name, torch.vmap(ours(name))(keys[0]), as_usual(jax.vmap(theirs(name)))(typed[0]))
    nested = torch.vmap(torch.vmap(ours(name), 0), 1)(keys)
    agree(name, nested, as_usual(jax.vmap(jax.vmap(theirs(name), 0), 1))(typed))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint32])
def test_vmap_of_keys_in_any_dtype(dtype):
    keys = random.split(random.key(1), 3).to(dtype)
    one_by_one = torch.stack([random.uniform(key, (4,)) for key in keys])
    assert torch.equal(torch.vmap(lambda key: random.uniform(key, (4,)))(keys), one_by_one)


def test_fold_in_of_batched_data():
    data = torch.tensor([0, 5, 2**32 - 1])
    got = torch.vmap(random.fold_in, (None, 0))(random.key(3), data)
    expected = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(3), data.numpy().astype("uint32")
    )
    agree("", random.key_data(got), jax.random.key_data(expected))


def test_keys_of_batched_seeds():
    got = torch.vmap(random.key)(torch.arange(4))
    agree("", random.key_data(got), jax.random.key_data(jax.vmap(jax.random.key)(np.arange(4))))


@pytest.mark.parametrize("name", DRAWS)
def test_make_fx(name):
    keys = random.split(random.key(2))
    traced = make_fx(ours(name))(keys[0])
    for key in keys:  # nothing that depends on the key was baked in
        assert torch.equal(traced(key), ours(name)(key))


@pytest.mark.parametrize("name", DRAWS)
def test_to_jax(name):
    """Lowered, a torch function of a key draws what JAX draws from it."""
    lowered = to_jax(ours(name))
    typed = jax.random.split(jax.random.key(3), 2)
    expected = jax.vmap(theirs(name))(typed)
    agree(name, lowered(typed[0]), expected[0])
    agree(name, lowered(jax.random.key_data(typed[0])), expected[0])
    agree(name, jax.jit(jax.vmap(lowered))(typed), expected)


def test_to_jax_with_a_key_of_its_own():
    lowered = to_jax(lambda x: x * random.uniform(random.fold_in(random.key(5), 1), (3,)))
    expected = jax.random.uniform(jax.random.fold_in(jax.random.key(5), 1), (3,))
    agree("", lowered(jnp.ones(3)), expected)
    closed_over = random.split(random.key(5))[1]
    with jax.enable_x64(True):
        got = to_jax(lambda x: x * random.uniform(closed_over, (3,)))(jnp.ones(3, "float32"))
    agree("", got, jax.random.uniform(jax.random.split(jax.random.key(5))[1], (3,)))


def test_to_jax_refuses_keys_of_other_generators():
    with pytest.raises(TypeError, match="key of rbg"):
        to_jax(random.split)(jax.random.key(0, impl="rbg"))


def test_the_sum_of_a_product_is_rounded_once():
    """Without it a draw between bounds is an ulp off now and then."""
    a, b, c = torch.rand(3, 100_000)
    exact = (a.double() * b.double() + c.double()).float()
    assert torch.equal(multiply_add(a, b, c), exact)
    assert not torch.equal(a * b + c, exact)
    wide = torch.rand(3, 1000, dtype=torch.float64)
    exact = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in wide.T.tolist()]
    assert multiply_add(*wide).tolist() == exact
    assert (wide[0] * wide[1] + wide[2]).tolist() != exact


@pytest.mark.parametrize("once", [True, False])
def test_float16_is_rounded_as_the_cpu_has_it(once, monkeypatch):
    """As XLA: fused on a CPU that has it; test_uniform_between_bounds compares with this one."""
    monkeypatch.setattr(_fused, "_CPU_HAS_FLOAT16", once)
    a, b, c = torch.rand(3, 10_000).half()
    exact = (a.double() * b.double() + c.double()).half()  # both exact
    assert torch.equal(multiply_add(a, b, c), exact if once else a * b + c)
    assert not torch.equal(a * b + c, exact)
    low, high, key = -3.0, 0.0, random.key(0)
    unit = random.uniform(key, (300,), torch.float16)
    product = unit.double() * 3 if once else unit * 3
    assert torch.equal(random.uniform(key, (300,), torch.float16, low, high), (product - 3).half())
    a, b, c = torch.rand(3, 10_000).bfloat16()
    assert torch.equal(multiply_add(a, b, c), a * b + c)


def test_what_the_cpu_has_says_nothing_of_other_devices(monkeypatch):
    monkeypatch.setattr(_fused, "_CPU_HAS_FLOAT16", True)
    x = torch.ones(3, dtype=torch.float16)
    for device, dtypes in (("cpu", {torch.float16, torch.float64}), ("meta", {torch.float16})):
        graph = make_fx(multiply_add)(*[x.to(device)] * 3).graph
        assert {n.meta["tensor_meta"].dtype for n in graph.nodes if n.op != "output"} == dtypes


def network(key, weight, x):
    first, second = random.split(key)
    hidden = random.dropout(first, torch.tanh(x @ weight), 0.4)
    return (random.dropout(second, hidden @ weight, 0.4) ** 2).sum()


def jax_network(key, weight, x):
    def dropout(key, x):
        return jnp.where(jax.random.bernoulli(key, np.float32(0.6), x.shape), x / 0.6, 0)

    first, second = jax.random.split(key)
    hidden = dropout(first, jnp.tanh(x @ weight))
    return (dropout(second, hidden @ weight) ** 2).sum()


TRANSFORMS = {
    "value": lambda of, f: f,
    "grad": lambda of, f: of.grad(f, 0),
    "hessian": lambda of, f: of.hessian(f),
    "jvp": lambda of, f: lambda w: of.jvp(f, (w,), (w * 0.5,))[1],
    "vmap(grad)": lambda of, f: lambda w: of.vmap(of.grad(f))((w * 1.0)[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_dropout_network_agrees_with_jax(transform):
    weight, x = torch.randn(3, 3), torch.randn(4, 3)
    of_jax = TRANSFORMS[transform](jax, lambda w: jax_network(jax.random.key(1), w, x.numpy()))
    expected = jax.jit(of_jax)(weight.numpy())
    for net in (network, functx.remat(network)):
        got = TRANSFORMS[transform](functx, lambda w, net=net: net(random.key(1), w, x))(weight)
        assert_close(expected, got)


def test_per_example_dropout_agrees_with_jax():
    weight, x = torch.randn(3, 3), torch.randn(5, 4, 3)
    keys = random.split(random.key(2), 5)
    per_example = functx.vmap(functx.grad(functx.remat(network), 1), (0, None, 0))
    expected = jax.jit(jax.vmap(jax.grad(jax_network, 1), (0, None, 0)))
    expected = expected(random.to_jax(keys), jnp.asarray(weight.numpy()), x.numpy())
    assert_close(expected, per_example(keys, weight, x))
    lowered = jax.jit(jax.vmap(jax.grad(to_jax(functx.remat(network)), 1), (0, None, 0)))
    got = lowered(random.to_jax(keys), jnp.asarray(weight.numpy()), jnp.asarray(x.numpy()))
    assert_close(got, torch.from_numpy(np.array(expected)))


def test_a_region_that_takes_a_key_needs_no_generator():
    """Its replay draws the same whatever became of torch's generator, kept or not."""
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(4, 3)
    (expected,) = torch.autograd.grad(network(random.key(1), weight, x), weight)
    for keep in (True, False):
        region = functx.remat(network, preserve_rng_state=keep)
        out = region(random.key(1), weight, x)
        torch.manual_seed(123)
        torch.rand(7)
        before = torch.get_rng_state()
        (got,) = torch.autograd.grad(out, weight)
        assert torch.equal(got, expected)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_region_that_takes_a_key_keeps_no_generator_state():
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(4, 3)

    def states(f, *args):
        """Copies of the state of torch's CPU generator that live on after the forward pass."""
        size = torch.get_rng_state().numel()

        def alive():
            tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
            return sum(x.dtype == torch.uint8 and x.numel() == size for x in tensors)

        gc.collect()  # other tests may have left some
        before = alive()
        out = functx.remat(f)(*args)
        assert out.requires_grad
        return alive() - before

    def drawing(weight, x):
        return torch.nn.functional.dropout(x @ weight).sum()

    assert states(network, random.key(1), weight, x) == 0
    assert states(drawing, weight, x) >= 1


def test_compile_without_a_graph_break():
    def f(key, x):
        first, second = random.split(key).unbind(0)
        return random.dropout(first, x, 0.3), random.normal(second, (5,)), random.bits(second)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        key, x = random.key(seed), torch.randn(6)
        for a, b in zip(compiled(key, x), f(key, x)):
            assert torch.equal(a, b)


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler"
)


@needs_compiler
def test_inductor_gives_the_same_bits():
    def f(key):
        return random.bits(key, (1000,)), random.uniform(key, (1000,))

    for a, b in zip(torch.compile(f, fullgraph=True)(random.key(0)), f(random.key(0))):
        assert torch.equal(a, b)


@needs_compiler
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_inductor_gives_the_same_numbers(dtype):
    def f(key):
        keys = random.split(key, 4).unbind(0)
        return (
            random.uniform(keys[0], (1000,), dtype),
            random.bernoulli(keys[1], 0.3, (1000,)),
            random.dropout(keys[2], torch.ones(1000, dtype=dtype), 0.1),
            random.normal(keys[3], (1000,), dtype),
        )

    *exact, normal = f(random.key(0))
    *compiled, compiled_normal = torch.compile(f, fullgraph=True)(random.key(0))
    for a, b in zip(compiled, exact):
        assert torch.equal(a, b)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(compiled_normal, normal, rtol=2 * eps, atol=0)


@needs_compiler
@pytest.mark.sweep
def test_inductor_rounds_once_between_bounds():
    def f(key):
        return random.uniform(key, (1000,), None, 0.3, 1.7)

    assert torch.equal(torch.compile(f, fullgraph=True)(random.key(0)), f(random.key(0)))
