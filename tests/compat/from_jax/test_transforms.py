"""A JAX function in torch: its twin under any transforms; what it takes and returns."""

import copy
import dataclasses
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import functx
from functx._core.errors import LoweringError
from functx.compat import from_jax, to_jax

from ..helpers import assert_close

# torch.func.linearize warns so of any function with more than one operation.
pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
TRACES = []


def jax_twin(w, x):
    TRACES.append(w.shape)
    return jnp.tanh(w * x) + jnp.sin(x) * w


def torch_twin(w, x):
    return torch.tanh(w * x) + torch.sin(x) * w


CONVERTED = from_jax(jax_twin, enable_x64=True)
W = torch.linspace(-1, 2, 3, dtype=torch.float64)
X = torch.linspace(-2, 1, 15, dtype=torch.float64).reshape(5, 3)
x = X[1]


def backward(f):
    leaves = [t.clone().requires_grad_() for t in (W, x)]
    f(*leaves).sum().backward()
    return [t.grad for t in leaves]


def double_backward(f):
    leaves = [t.clone().requires_grad_() for t in (W, x)]
    (g,) = torch.autograd.grad(f(*leaves).square().sum(), leaves[0], create_graph=True)
    return torch.autograd.grad(g.sin().sum(), leaves)


def total(f):
    return lambda *args: f(*args).sum()


# `t` is torch.func or functx, `f` the function.
COMPOSED = {
    "forward": lambda t, f: f(W, x),
    "backward": lambda t, f: backward(f),
    "double backward": lambda t, f: double_backward(f),
    "grad": lambda t, f: t.grad(total(f), argnums=(0, 1))(W, x),
    "vjp": lambda t, f: t.vjp(f, W, x)[1](x),
    "vmap (0, None)": lambda t, f: t.vmap(f, in_dims=(0, None))(X, x),
    "vmap(grad)": lambda t, f: t.vmap(t.grad(total(f), (0, 1)), in_dims=(None, 0))(W, X),
    "grad(vmap)": lambda t, f: t.grad(lambda w: t.vmap(f, (None, 0))(w, X).sum())(W),
    "jvp": lambda t, f: t.jvp(f, (W, x), (x, W)),
    "vmap(jvp)": lambda t, f: t.vmap(lambda x, v: t.jvp(lambda x: f(W, x), (x,), (v,)))(X, 2 * X),
    "jvp(vmap)": lambda t, f: t.jvp(lambda X: t.vmap(f, (None, 0))(W, X), (X,), (X + 1,)),
    "jacrev": lambda t, f: t.jacrev(f, (0, 1))(W, x),
    "jacfwd": lambda t, f: t.jacfwd(f, (0, 1))(W, x),
    "hessian": lambda t, f: t.hessian(total(f), (0, 1))(W, x),
    "checkpoint, reentrant": lambda t, f: backward(partial(checkpoint, f, use_reentrant=True)),
    "checkpoint": lambda t, f: backward(partial(checkpoint, f, use_reentrant=False)),
    "jacfwd of jacrev of jacrev": lambda t, f: t.jacfwd(t.jacrev(t.jacrev(f)))(W, x),
    "grad of jvp": lambda t, f: t.grad(lambda x: t.jvp(lambda x: f(W, x), (x,), (W,))[1].sum())(x),
    "linearize": lambda t, f: t.linearize(lambda x: f(W, x), x)[1](W),
    "vmap(grad) of remat": lambda t, f: COMPOSED["vmap(grad)"](t, functx.remat(f)),
    "hessian of remat": lambda t, f: t.hessian(total(functx.remat(f)), (0, 1))(W, x),
    "double backward of remat": lambda t, f: double_backward(functx.remat(f)),
    "remat of grad": lambda t, f: backward(functx.remat(lambda w, x: t.grad(total(f), 1)(w, x))),
    "captured by remat": lambda t, f: backward(lambda w, x: functx.remat(lambda x: f(w, x))(x)),
    "functionalize": lambda t, f: t.functionalize(t.grad(total(f)))(W, x),
    "vmap in chunks": lambda t, f: t.vmap(f, (None, 0), chunk_size=2)(W, X),
}


# Of torch.func and of functx in turn; of both in sweeps.
GRID = [
    pytest.param(name, library, marks=pytest.mark.sweep if (i + j) % 2 else ())
    for i, name in enumerate(COMPOSED)
    for j, library in enumerate((torch.func, functx))
]


@pytest.mark.parametrize(("name", "library"), GRID)
def test_a_composition_is_that_of_the_twin(name, library):
    got, expected = (COMPOSED[name](library, f) for f in (CONVERTED, torch_twin))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_a_function_is_traced_once_for_each_signature():
    TRACES.clear()
    f = from_jax(jax_twin, enable_x64=True)
    for name in ("double backward", "vmap(grad)", "jvp(vmap)", "hessian", "hessian of remat"):
        COMPOSED[name](torch.func, f)
    assert TRACES == [(3,)]
    f(X, X)
    f(X, X)
    assert TRACES == [(3,), (5, 3)]
    f(W.float(), x.float())
    assert len(TRACES) == 3


def test_a_function_is_compiled_once():
    names, compiled = [], []
    f = from_jax(lambda x: jnp.sin(x))
    listen = jax.monitoring.register_event_duration_secs_listener
    listen(lambda name, seconds, **kwargs: names.append(name))
    for _ in range(4):
        f(torch.ones(7, requires_grad=True)).sum().backward()
        compiled.append(sum("backend_compile" in name for name in names))
    assert 1 <= compiled[0] == compiled[-1] <= 2
    jax.monitoring.clear_event_listeners()


def inner(w, x):
    return jnp.tanh(w * x) * w


converted_inner = from_jax(inner)
WEIGHT, GIVEN = jnp.linspace(0.5, 1.5, 3), jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


there = lambda w, x: (converted_inner(w, torch.sin(x)) * w).sum()
expected = lambda w, x: (inner(w, jnp.sin(x)) * w).sum()


per_example = jax.vmap(jax.grad(expected), (None, 0))
THERE = {
    "hessian": (jax.hessian(to_jax(there)), jax.hessian(expected)),
    "grad inside": (to_jax(torch.func.grad(there)), jax.grad(expected)),
    "grad of grad": (jax.jacrev(to_jax(functx.grad(functx.remat(there)))), jax.hessian(expected)),
    "vmap(grad)": (jax.vmap(jax.grad(to_jax(there)), (None, 0)), per_example),
    "vmap(grad) inside": (to_jax(functx.vmap(functx.grad(there), (None, 0))), per_example),
}


@pytest.mark.parametrize("name", THERE)
def test_it_is_as_without_the_way_round(name):
    ours, theirs = THERE[name]
    assert_close(*(jax.jit(g)(WEIGHT, GIVEN) for g in (ours, theirs)), rtol=1e-5)
    assert "callback" not in str(jax.make_jaxpr(ours)(WEIGHT, GIVEN))


def test_it_goes_back_again():
    x = torch.from_numpy(np.array(GIVEN)).requires_grad_()
    w = torch.from_numpy(np.array(WEIGHT)).requires_grad_()
    from_jax(to_jax(there))(w, x).backward()
    assert_close((w.grad, x.grad), jax.grad(expected, (0, 1))(WEIGHT, GIVEN), rtol=1e-5)


def test_other_settings_are_refused_and_a_number_is_a_constant():
    wide = from_jax(inner, enable_x64=True)
    with pytest.raises(LoweringError, match="other JAX settings"):
        to_jax(lambda w, x: wide(w, x))(WEIGHT, WEIGHT)
    scaled = from_jax(lambda x, s: jnp.sin(x) * s)
    gradient = to_jax(functx.grad(lambda x: functx.remat(lambda x: scaled(x, 2.5))(x).sum()))
    np.testing.assert_allclose(gradient(WEIGHT), 2.5 * jnp.cos(WEIGHT), rtol=1e-6)


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
    assert (out["none"], out["sum"].tolist(), type(out["layer"])) == (None, [5, 5], Layer)
    assert (out["layer"].weight.tolist(), out["layer"].bias[0][1]) == ([1, 1], None)


def test_keys_are_arguments():
    noisy = lambda key, x: x * jax.random.normal(key, x.shape)
    key = jax.random.key(7)
    expected = np.asarray(jax.random.normal(key, (3,)))
    x = torch.ones(3, requires_grad=True)
    y = from_jax(noisy)(key, x)
    y.sum().backward()
    np.testing.assert_array_equal(y.detach(), expected)
    np.testing.assert_array_equal(x.grad, expected)
    raw = from_jax(noisy)(jax.random.key_data(key), x)
    assert torch.equal(raw, y)
    new, _ = from_jax(lambda key, x: (jax.random.split(key)[0], x + 1))(key, torch.zeros(2))
    assert new == jax.random.split(key)[0]
    with pytest.raises(TypeError, match="key_data"):
        torch.vmap(from_jax(jax.random.wrap_key_data))(torch.zeros(3, 2, dtype=torch.uint32))
    rbg = jax.random.key(7, impl="rbg")  # another generator
    np.testing.assert_array_equal(from_jax(noisy)(rbg, torch.ones(3)), noisy(rbg, jnp.ones(3)))


def cube(x):
    return x**3


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
    with pytest.raises(TypeError, match="Register it as a JAX pytree"):
        f(x, "leave", {1, 2})


@pytest.mark.parametrize("dtype", ["int4", "float8_e5m2"])
def test_arrays_of_jax_and_numpy_pass_through_also_in_a_dtype_that_torch_lacks(dtype):
    values = jnp.arange(4).astype(dtype)
    f = from_jax(lambda v, q, x: (v["w"].astype(jnp.float32) * x + q, v["w"]))
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(LoweringError, match="float64"):
        f({"w": values}, np.zeros(4), x)
    out, same = f({"w": values}, np.zeros(4, np.float32), x)
    out.sum().backward()
    np.testing.assert_array_equal(out.detach(), np.asarray(values.astype(jnp.float32)))
    np.testing.assert_array_equal(x.grad, np.asarray(values.astype(jnp.float32)))
    if isinstance(same, jax.Array):
        assert same.dtype == values.dtype


@pytest.mark.parametrize("shape", [(2,), (0, 3), ()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_a_gradient_has_the_dtype_and_shape_of_its_argument(dtype, shape):
    x = torch.full(shape, 2.0, dtype=dtype, requires_grad=True)
    out = from_jax(cube, enable_x64=True)(x)
    assert out.dtype == dtype
    out.abs().sum().backward()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, torch.full_like(x, 12.0).detach())


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
    for g in (torch.ones(2), jnp.ones(2), 3, torch.sin, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="takes a JAX function"):
            from_jax(g)
    with pytest.raises(TypeError, match="must be Tensor") as caught:
        from_jax(lambda x: torch.sin(x))(torch.ones(2))
    assert "takes JAX functions, but <lambda> calls torch" in caught.value.__notes__[0]
    for options in ({"static_argnames": "no_such_argument"}, {"static_argnums": "x"}):
        with pytest.raises((TypeError, ValueError)):
            from_jax(cube, **options)
