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


def test_pytrees_go_in_and_out():
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


def test_one_of_several_results_is_pulled_back():
    f = from_jax(lambda x, m, i: (2 * x, jnp.argmax(x), jnp.where(m, 3 * x[i], 0)))
    x = torch.nn.Parameter(torch.ones(2))
    _, i, b = f(x, torch.tensor([True, False]), torch.tensor([0, 0]))
    assert not i.requires_grad
    assert i.dtype == torch.int32
    b.sum().backward()
    assert x.grad.tolist() == [3, 0]
    assert type(x.grad) is torch.Tensor


def test_keys_are_arguments():
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
    new, _ = from_jax(lambda key, x: (jax.random.split(key)[0], x + 1))(key, torch.zeros(2))
    assert new == jax.random.split(key)[0]
    with pytest.raises(TypeError, match="key_data"):
        torch.vmap(from_jax(jax.random.wrap_key_data))(torch.zeros(3, 2, dtype=torch.uint32))
    rbg = jax.random.key(7, impl="rbg")  # another generator
    np.testing.assert_array_equal(from_jax(noisy)(rbg, torch.ones(3)), noisy(rbg, jnp.ones(3)))


def test_a_function_may_take_and_return_no_tensor():
    assert from_jax(lambda: {"a": jnp.arange(3)})()["a"].tolist() == [0, 1, 2]
    assert from_jax(lambda: ())() == ()
    assert from_jax(lambda x: None)(torch.ones(2)) is None
    assert from_jax(lambda n: jnp.full((), n * 2))(3) == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
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
    with pytest.raises(OverflowError):
        f(x, 2**40, 1, True)


@pytest.mark.parametrize(
    "options", [{"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": (-1,)}]
)
def test_static_arguments_are_those_of_jit(options):
    f = from_jax(lambda x, n: x.reshape(n, -1), **options)
    assert f(torch.ones(6), 2).shape == (2, 3)
    assert f(torch.ones(6), 3).shape == (3, 2)
    if options != {"static_argnums": (-1,)}:
        assert f(torch.ones(6), n=3).shape == (3, 2)
    with pytest.raises(ValueError, match=r"not hashable.*tuple"):
        f(torch.ones(6), [2])
    shaped = jax.jit(lambda x, *, n: x.reshape(n, -1), static_argnames="n")
    assert from_jax(shaped)(torch.ones(6), n=2).shape == (2, 3)


def test_what_is_no_array_is_static():
    f = from_jax(lambda x, mode, fn: fn(x) if mode == "apply" else x)
    x = torch.zeros(2)
    assert f(x, "apply", jnp.cos).tolist() == [1, 1]
    assert f(x, "leave", jnp.cos).tolist() == [0, 0]
    with pytest.raises(TypeError, match="register it as a JAX pytree"):
        f(x, "leave", {1, 2})


def test_arrays_of_jax_and_numpy_are_arguments_too():
    f = from_jax(lambda p, q, x: p["w"] * x + q)
    x = torch.ones(2, requires_grad=True)
    out = f({"w": jnp.full(2, 2.0)}, np.ones(2, np.float32), x)
    out.sum().backward()
    assert out.tolist() == [3, 3]
    assert x.grad.tolist() == [2, 2]
    with pytest.raises(LoweringError, match="float64"):
        f({"w": jnp.ones(2)}, np.ones(2), x)


@pytest.mark.parametrize("dtype", ["int4", "float8_e5m2"])
def test_a_dtype_that_torch_lacks_passes_through(dtype):
    values = jnp.arange(4).astype(dtype)
    f = from_jax(lambda v, x: (v.astype(jnp.float32) * x, v))
    x = torch.ones(4, requires_grad=True)
    out, same = f(values, x)
    out.sum().backward()
    np.testing.assert_array_equal(out.detach(), np.asarray(values.astype(jnp.float32)))
    np.testing.assert_array_equal(x.grad, np.asarray(values.astype(jnp.float32)))
    if isinstance(same, jax.Array):
        assert same.dtype == values.dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_gradient_has_the_dtype_of_its_argument(dtype):
    x = torch.full((2,), 2.0, dtype=dtype, requires_grad=True)
    out = from_jax(cube, enable_x64=True)(x)
    assert out.dtype == dtype
    out.abs().sum().backward()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, torch.full_like(x, 12.0).detach())


def test_zero_sizes_and_no_dimensions_are_fine():
    f = from_jax(lambda x, y: (2 * x, x.sum(0), y * 3))
    x, y = torch.ones(0, 3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    outs = f(x, y)
    assert [o.shape for o in outs] == [(0, 3), (3,), ()]
    sum(o.sum() for o in outs).backward()
    assert x.grad.shape == (0, 3)
    assert y.grad == 3
    tangents = torch.func.jvp(f, (x.detach(), y.detach()), (x.detach(), y.detach()))[1]
    assert tangents[2] == 6


def test_it_is_a_method_copied_and_pickled():
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


def test_wrong_use_is_refused():
    for g, message in (
        (lambda x: torch.ones(2), "returned a torch tensor"),
        (lambda x: "text", "returned a str"),
    ):
        with pytest.raises(TypeError, match=message):
            from_jax(g)(torch.ones(2))
    for g in (torch.ones(2), jnp.ones(2), 3):
        with pytest.raises(TypeError, match="takes a JAX function"):
            from_jax(g)
    for options in ({"static_argnames": "no_such_argument"}, {"static_argnums": "x"}):
        with pytest.raises((TypeError, ValueError)):
            from_jax(cube, **options)
