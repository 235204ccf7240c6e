"""What a function made by from_jax takes and returns: pytrees, statics, keys, numbers, dtypes."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from functx._errors import LoweringError
from functx.compat import from_jax


def cube(x):
    return x**3


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: object
    bias: object


def test_pytrees_in_and_out():
    def g(tree, *, extra):
        return {"sum": tree["b"][0] + extra, "none": None, "layer": Layer(tree["a"], [tree["b"]])}

    a, b, c = (torch.full((2,), float(n)) for n in (1, 2, 3))
    out = from_jax(g)({"b": (b, None), "a": a}, extra=c)
    assert list(out) == ["layer", "none", "sum"]
    assert out["none"] is None
    assert out["sum"].tolist() == [5, 5]
    assert isinstance(out["layer"], Layer)
    assert out["layer"].weight.tolist() == [1, 1]
    assert out["layer"].bias[0][1] is None


def test_gradients_reach_any_subset_of_the_leaves():
    f = from_jax(lambda p, q: (p["a"] * p["b"], p["b"] * q))
    for mask in range(1, 8):
        leaves = [torch.tensor(n + 2.0, requires_grad=bool(mask >> n & 1)) for n in range(3)]
        outs = f({"a": leaves[0], "b": leaves[1]}, leaves[2])
        assert [o.requires_grad for o in outs] == [True, True]
        sum(outs).backward()
        expected = [3.0, 6.0, 3.0]
        for leaf, value in zip(leaves, expected):
            assert (leaf.grad is None) == (not leaf.requires_grad)
            assert leaf.grad is None or leaf.grad == value


def test_one_of_several_results_is_pulled_back():
    f = from_jax(lambda x: (2 * x, jnp.argmax(x), 3 * x))
    x = torch.ones(2, requires_grad=True)
    _, i, b = f(x)
    assert not i.requires_grad
    assert i.dtype == torch.int32
    b.sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_integer_and_bool_arguments():
    f = from_jax(lambda x, i, m: jnp.where(m, x[i], 0.0))
    x = torch.arange(4.0).requires_grad_()
    f(x, torch.tensor([1, 1, 3]), torch.tensor([True, True, False])).sum().backward()
    assert x.grad.tolist() == [0, 2, 0, 0]


def test_typed_keys():
    def noisy(key, x):
        return x * jax.random.normal(key, x.shape)

    key = jax.random.key(7)
    expected = np.asarray(jax.random.normal(key, (3,)))
    x = torch.ones(3, requires_grad=True)
    y = from_jax(noisy)(key, x)
    y.sum().backward()
    np.testing.assert_array_equal(y.detach(), expected)
    np.testing.assert_array_equal(x.grad, expected)
    raw = from_jax(noisy)(jax.random.key_data(key), x)
    assert torch.equal(raw, y)
    as_tensor = torch.from_dlpack(jax.random.key_data(key))
    assert torch.equal(from_jax(noisy)(as_tensor, x), y)


def test_keys_of_another_kind_keep_it():
    key = jax.random.key(7, impl="rbg")
    x = from_jax(lambda key: jax.random.uniform(key, (3,)))(key)
    np.testing.assert_array_equal(x, jax.random.uniform(key, (3,)))


def test_keys_come_back_as_keys():
    key = jax.random.key(1)
    f = from_jax(lambda key, x: (jax.random.split(key)[0], x + 1))
    new, _ = f(key, torch.zeros(2))
    assert new == jax.random.split(key)[0]
    with pytest.raises(TypeError, match="key_data"):
        torch.vmap(from_jax(jax.random.wrap_key_data))(torch.zeros(3, 2, dtype=torch.uint32))


def test_keys_are_batched():
    keys = jax.random.split(jax.random.key(0), 4)
    f = from_jax(lambda key, x: x * jax.random.uniform(key, x.shape))
    out = torch.vmap(f, (0, None))(torch.from_dlpack(jax.random.key_data(keys)), torch.ones(3))
    np.testing.assert_array_equal(out, jax.vmap(lambda k: jax.random.uniform(k, (3,)))(keys))


def test_no_tensors_at_all():
    assert from_jax(lambda: {"a": jnp.arange(3)})()["a"].tolist() == [0, 1, 2]
    assert from_jax(lambda: ())() == ()
    assert from_jax(lambda x: None)(torch.ones(2)) is None
    assert from_jax(lambda n: jnp.full((), n * 2))(3) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_are_weakly_typed(dtype):
    traces = []

    def g(x, number, integer, flag):
        traces.append(1)
        return x * number + integer * flag

    f = from_jax(g)
    x = torch.ones(2, dtype=dtype)
    assert f(x, 2.5, 3, True).dtype == dtype
    assert f(x, 0.5, 1, False).tolist() == [0.5, 0.5]
    assert len(traces) == 1
    assert f(x, jnp.asarray(2.0) * 1, 3, True).dtype == dtype  # weakly typed, too


def test_numbers_too_large_are_an_error():
    with pytest.raises(OverflowError):
        from_jax(lambda x, n: x * n)(torch.ones(2), 2**40)


@pytest.mark.parametrize(
    "options", [{"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": (-1,)}]
)
def test_static_arguments(options):
    f = from_jax(lambda x, n: x.reshape(n, -1), **options)
    assert f(torch.ones(6), 2).shape == (2, 3)
    assert f(torch.ones(6), 3).shape == (3, 2)
    if options != {"static_argnums": (-1,)}:
        assert f(torch.ones(6), n=3).shape == (3, 2)
    with pytest.raises(ValueError, match=r"not hashable.*tuple"):
        f(torch.ones(6), [2])


def test_static_arguments_of_a_jitted_function():
    @jax.jit
    def double(x):
        return x * 2

    assert from_jax(double)(torch.ones(2)).tolist() == [2, 2]
    shaped = jax.jit(lambda x, *, n: x.reshape(n, -1), static_argnames="n")
    assert from_jax(shaped)(torch.ones(6), n=2).shape == (2, 3)


def test_what_is_no_array_is_static():
    f = from_jax(lambda x, mode, fn: fn(x) if mode == "apply" else x)
    x = torch.zeros(2)
    assert f(x, "apply", jnp.cos).tolist() == [1, 1]
    assert f(x, "leave", jnp.cos).tolist() == [0, 0]
    with pytest.raises(TypeError, match="register it as a JAX pytree"):
        f(x, "leave", {1, 2})


def test_arrays_of_the_other_kinds():
    f = from_jax(lambda p, q, x: p["w"] * x + q)
    x = torch.ones(2, requires_grad=True)
    out = f({"w": jnp.full(2, 2.0)}, np.ones(2, np.float32), x)
    out.sum().backward()
    assert out.tolist() == [3, 3]
    assert x.grad.tolist() == [2, 2]
    with pytest.raises(LoweringError, match="float64"):
        f({"w": jnp.ones(2)}, np.ones(2), x)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3b11fnuz", "float8_e5m2"])
def test_dtypes_that_torch_lacks_pass_through(dtype):
    values = jnp.arange(4).astype(dtype)
    f = from_jax(lambda v, x: (v.astype(jnp.float32) * x, v))
    x = torch.ones(4, requires_grad=True)
    out, same = f(values, x)
    out.sum().backward()
    np.testing.assert_array_equal(out.detach(), np.asarray(values.astype(jnp.float32)))
    np.testing.assert_array_equal(x.grad, np.asarray(values.astype(jnp.float32)))
    if isinstance(same, jax.Array):
        assert same.dtype == values.dtype


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ],
)
def test_dtypes_of_gradients(dtype):
    x = torch.full((2,), 2.0, dtype=dtype, requires_grad=True)
    out = from_jax(cube, enable_x64=True)(x)
    assert out.dtype == dtype
    out.abs().sum().backward()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, torch.full_like(x, 12.0).detach())


def test_zero_sizes_and_no_dimensions():
    f = from_jax(lambda x, y: (2 * x, x.sum(0), y * 3))
    x, y = torch.ones(0, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    outs = f(x, y)
    assert [o.shape for o in outs] == [(0, 3), (3,), ()]
    sum(o.sum() for o in outs).backward()
    assert x.grad.shape == (0, 3)
    assert y.grad == 3
    tangents = torch.func.jvp(f, (x.detach(), y.detach()), (x.detach(), y.detach()))[1]
    assert tangents[2] == 6


def test_parameters_and_subclasses():
    p = torch.nn.Parameter(torch.ones(2))
    from_jax(cube)(p).sum().backward()
    assert type(p.grad) is torch.Tensor
    assert p.grad.tolist() == [3, 3]


def test_methods_copies_and_pickles():
    class Model:
        scale = 3.0

        @from_jax
        def __call__(self, x):
            return self.scale * x

    assert Model()(torch.ones(2)).tolist() == [3, 3]
    f = from_jax(cube)
    assert copy.deepcopy(f)(torch.tensor(2.0)) == 8
    assert pickle.loads(pickle.dumps(f))(torch.tensor(2.0)) == 8
    assert f.__name__ == "cube"
    assert repr(f) == "from_jax(cube)"


def test_inside_a_jax_transform_it_is_the_jax_function():
    f = from_jax(cube)
    assert jax.grad(f)(2.0) == 12
    assert from_jax(lambda x: f(x) + 1)(torch.tensor(2.0)) == 9
    with pytest.raises(TypeError, match="JAX is tracing"):
        jax.jit(lambda x: from_jax(jnp.add)(torch.ones(2), x))(jnp.ones(2))


@pytest.mark.parametrize(
    ("g", "message"),
    [
        (lambda x: torch.ones(2), "returned a torch tensor"),
        (lambda x: "text", "returned a str"),
    ],
)
def test_wrong_results(g, message):
    with pytest.raises(TypeError, match=message):
        from_jax(g)(torch.ones(2))


@pytest.mark.parametrize("g", [torch.ones(2), jnp.ones(2), 3])
def test_what_is_no_function(g):
    with pytest.raises(TypeError, match="takes a JAX function"):
        from_jax(g)


def test_wrong_options():
    with pytest.raises((TypeError, ValueError)):
        from_jax(cube, static_argnames="no_such_argument")
    with pytest.raises((TypeError, ValueError)):
        from_jax(cube, static_argnums="x")


def test_errors_of_the_function_are_its_own():
    def g(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        from_jax(g)(torch.ones(2, requires_grad=True))
