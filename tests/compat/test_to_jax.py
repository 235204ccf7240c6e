"""``to_jax`` under every JAX transform, its caches, its statics and its guards."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

import functx
from functx._errors import LoweringError
from functx.compat import to_jax

from .networks import arrays, assert_close

X = torch.linspace(-1.0, 1.0, 6)


def f(x):
    return torch.tanh(x * 2) * x.flip(0)


def loss(x):
    return f(x).sum()


COMPOSITIONS = {
    "call": (lambda g: g, lambda g: g, f),
    "jit": (jax.jit, lambda g: g, f),
    "grad": (jax.grad, torch.func.grad, loss),
    "jit(grad)": (lambda g: jax.jit(jax.grad(g)), torch.func.grad, loss),
    "vmap": (jax.vmap, torch.vmap, lambda x: torch.sin(x)),
    "vmap(grad)": (
        lambda g: jax.vmap(jax.grad(g)),
        lambda g: torch.vmap(torch.func.grad(g)),
        lambda x: torch.sin(x) * x,
    ),
    "jvp": (
        lambda g: lambda x: jax.jvp(g, (x,), (x,))[1],
        lambda g: lambda x: torch.func.jvp(g, (x,), (x,))[1],
        f,
    ),
    "vjp": (
        lambda g: lambda x: jax.vjp(g, x)[1](x)[0],
        lambda g: lambda x: torch.func.vjp(g, x)[1](x)[0],
        f,
    ),
    "jvp(grad)": (
        lambda g: lambda x: jax.jvp(jax.grad(g), (x,), (x,))[1],
        lambda g: lambda x: torch.func.jvp(torch.func.grad(g), (x,), (x,))[1],
        loss,
    ),
    "grad(jvp)": (
        lambda g: lambda x: jax.grad(lambda y: jax.jvp(g, (y,), (x,))[1])(x),
        lambda g: lambda x: torch.func.grad(lambda y: torch.func.jvp(g, (y,), (x,))[1])(x),
        loss,
    ),
    "hessian": (jax.hessian, torch.func.hessian, loss),
    "jacfwd(jacrev)": (
        lambda g: jax.jacfwd(jax.jacrev(g)),
        lambda g: torch.func.jacfwd(torch.func.jacrev(g)),
        f,
    ),
    "checkpoint": (lambda g: jax.grad(jax.checkpoint(g)), torch.func.grad, loss),
    "scan": (
        lambda g: lambda x: lax.scan(lambda c, _: (g(c), None), x, length=3)[0],
        lambda g: lambda x: g(g(g(x))),
        f,
    ),
    "grad(scan(checkpoint))": (
        lambda g: jax.grad(
            lambda x: lax.scan(lambda c, _: (jax.checkpoint(g)(c), None), x, length=3)[0].sum()
        ),
        lambda g: torch.func.grad(lambda x: g(g(g(x))).sum()),
        f,
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composition(name):
    in_jax, in_torch, g = COMPOSITIONS[name]
    assert_close(in_jax(to_jax(g))(arrays(X)), in_torch(g)(X), rtol=1e-5)


TRANSFORMS_INSIDE = {
    "grad": lambda: functx.grad(loss),
    "vmap(grad)": lambda: functx.vmap(functx.grad(lambda x: torch.sin(x) * x)),
    "jvp": lambda: lambda x: functx.jvp(f, (x,), (x,))[1],
    "jacrev": lambda: functx.jacrev(f),
    "jacfwd": lambda: functx.jacfwd(f),
    "hessian": lambda: functx.hessian(loss),
}


@pytest.mark.parametrize("name", TRANSFORMS_INSIDE)
def test_torch_transform_inside(name):
    g = TRANSFORMS_INSIDE[name]()
    assert_close(to_jax(g)(arrays(X)), g(X), rtol=1e-5)


@pytest.mark.parametrize("name", TRANSFORMS_INSIDE)
def test_derivative_of_a_torch_transform(name):
    g = TRANSFORMS_INSIDE[name]()
    expected = torch.func.jacfwd(g)(X)
    assert_close(jax.jacrev(to_jax(g))(arrays(X)), expected, rtol=1e-5)


def test_pytrees_in_and_out():
    Pair = collections.namedtuple("Pair", "a b")

    def g(tree, scale=1.0):
        return {"sum": tree["x"] + tree["pair"].a, "list": [tree["pair"].b * scale, None, 3]}

    tree = {"x": X, "pair": Pair(X, 2 * X)}
    got = to_jax(g)(arrays(tree), scale=2.0)
    assert_close([got["sum"], got["list"][0]], [2 * X, 4 * X])
    assert got["list"][1:] == [None, 3]


class Log:
    """Compared by identity, so that filling it does not count as another environment."""

    def __init__(self):
        self.traces = []


def test_new_shapes_dtypes_and_statics_trace_again():
    log = Log()

    def g(x, flag):
        log.traces.append((tuple(x.shape), x.dtype, flag))
        return x + 1 if flag else x - 1

    h = to_jax(g)
    for x in (jnp.ones(2), jnp.ones(3), jnp.ones(3, jnp.float16), jnp.ones(3)):
        h(x, True)
    np.testing.assert_array_equal(h(jnp.ones(3), False), np.zeros(3))
    assert log.traces == [
        ((2,), torch.float32, True),
        ((3,), torch.float32, True),
        ((3,), torch.float16, True),
        ((3,), torch.float32, False),
    ]


def test_one_and_true_are_different_statics():
    h = to_jax(lambda x, n: x * 2 if n is True else x)
    assert float(h(jnp.ones(()), 1)) == 1
    assert float(h(jnp.ones(()), True)) == 2


def test_closed_over_tensor_is_read_at_each_call():
    w = torch.ones(3)
    h = to_jax(lambda x: x * w)
    assert h(jnp.ones(3)).tolist() == [1, 1, 1]
    w.mul_(2)
    assert h(jnp.ones(3)).tolist() == [2, 2, 2]
    w = torch.zeros(3)
    assert h(jnp.ones(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_writes_past_the_version_counter_are_seen(dtype):
    """Through ``.data``, as initialisation and clipping do, and to inference tensors."""
    w = torch.tensor([1, 0, 1], dtype=dtype)
    with torch.inference_mode():
        v = torch.zeros(3, dtype=dtype)
    h = to_jax(lambda: (w * 1, v * 1))
    h()
    w.data.zero_()
    with torch.inference_mode():
        v.fill_(1)
    assert [x.tolist() for x in h()] == [[0, 0, 0], [1, 1, 1]]


def counting():
    appended, raised, at, n = [], {"n": 0}, [0], 0

    def f(x):
        nonlocal n
        appended.append(x.shape)
        raised["n"] += 1
        at[0] += 1
        n += 1
        return x * 2

    return f, lambda: (len(appended), raised["n"], at[0], n)


def test_counting_calls_traces_nothing_again():
    f, counts = counting()
    h = to_jax(f)
    for size, expected in ((3, 1), (3, 1), (4, 2), (3, 2)):
        h(jnp.ones(size))
        assert counts() == (expected,) * 4


def test_a_counter_that_is_read_does():
    n, steps = 0, []

    def f(x):
        nonlocal n
        n += 1
        steps.append(n)
        return x * len(steps)

    h = to_jax(f)
    assert [float(h(jnp.ones(()))) for _ in range(3)] == [1, 2, 3]


def test_a_tensor_that_is_replaced_is_no_counter():
    state = {"w": torch.ones(())}

    def f(x):
        state["w"] += 0
        return x

    h = to_jax(f)
    with pytest.raises(LoweringError, match="closes over"):
        h(jnp.ones(()))


def test_module_is_read_at_each_call():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).eval()
    h = to_jax(lambda x: net(x))
    x = torch.ones(1, 2)
    assert_close(h(arrays(x)), net(x))
    with torch.no_grad():
        net[0].bias.add_(1)
    assert_close(h(arrays(x)), net(x))
    net[0].weight = torch.nn.Parameter(torch.ones(2, 2))
    assert_close(h(arrays(x)), net(x))
    net.train()
    with pytest.raises(LoweringError, match="need a key"):
        h(arrays(x))


def test_gradient_inside_jit_does_not_leak_tracers():
    w = torch.ones(3)
    h = to_jax(lambda x: (x * w).sum())
    jax.jit(jax.grad(h))(jnp.ones(3))
    assert h(jnp.ones(3)) == 3


def test_scan_keeps_the_carry_type():
    carry, _ = lax.scan(
        lambda c, _: (to_jax(lambda x: x * 2)(c), None), 1.0 + jnp.zeros(()), length=2
    )
    assert float(carry) == 4


def test_ambient_grad_mode_does_not_cut_gradients():
    with torch.no_grad():
        assert float(jax.grad(to_jax(torch.sin))(0.0 * jnp.ones(()))) == 1


def test_writes_and_views():
    def g(x):
        y = x * 1
        y[1:3].mul_(x[1:3])
        y.view(-1)[0].add_(x[4])
        y[::2] = torch.sin(x[::2])
        return y

    assert_close(to_jax(g)(arrays(X)), g(X))
    expected = torch.func.jacrev(g)(X)
    assert_close(jax.jacrev(to_jax(g))(arrays(X)), expected)


def test_writes_to_an_argument_warn():
    with pytest.warns(UserWarning, match="writes to 1 of its arguments"):
        out = to_jax(lambda x: x.add_(1))(jnp.zeros(2))
    assert out.tolist() == [1, 1]


def test_writes_to_a_closed_over_tensor_are_refused():
    seen = torch.zeros(2)

    def g(x):
        seen.add_(x)
        return x + seen

    with pytest.raises(LoweringError, match="closes over"):
        to_jax(g)(jnp.ones(2))
    assert seen.tolist() == [0, 0]


def test_batch_norm_in_training_is_refused():
    net = torch.nn.BatchNorm1d(2)
    params, fn = to_jax(net)
    with pytest.raises(LoweringError, match=r"module\.eval\(\)"):
        fn(params, jnp.ones((3, 2)))


def test_every_missing_operation_is_listed():
    def g(x):
        return torch.special.airy_ai(x) + torch.hash_tensor(x)

    with pytest.raises(LoweringError) as err:
        to_jax(g)(jnp.ones(3))
    assert "special_airy_ai" in str(err.value)
    assert "hash_tensor" in str(err.value)


@pytest.mark.parametrize(
    ("g", "names"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
        (lambda x: x[x > 0], "index"),
        (torch.nonzero, "nonzero"),
        (torch.unique, "unique"),
    ],
)
def test_data_dependent_operations_are_refused_by_name(g, names):
    with pytest.raises(LoweringError, match=names):
        to_jax(g)(jnp.ones(3))


def test_torch_tensor_argument():
    with pytest.raises(TypeError, match=r"argument at \[0\]\[1\] is a torch tensor"):
        to_jax(lambda x, y: x + y)(jnp.ones(2), torch.ones(2))


@pytest.mark.parametrize("bad", [3, "f", torch.ones(2), None])
def test_not_callable(bad):
    with pytest.raises(TypeError, match="torch function, module or exported program"):
        to_jax(bad)


def test_unhashable_static_argument():
    with pytest.raises(TypeError, match="neither an array nor hashable"):
        to_jax(lambda x, s: x)(jnp.ones(2), {1, 2})


def test_strange_result():
    with pytest.raises(TypeError, match="returned a object"):
        to_jax(lambda x: object())(jnp.ones(2))


def test_random_needs_a_key():
    g = torch.nn.Dropout(0.5)
    h = to_jax(lambda x: g(x))
    with pytest.raises(LoweringError, match="rng=True"):
        h(jnp.ones(8))
    h = to_jax(lambda x: g(x), rng=True)
    with pytest.raises(TypeError, match=r"jax\.random key"):
        h(jnp.ones(8))
    one, same, other = (h(jax.random.key(s), jnp.ones(64)) for s in (0, 0, 1))
    assert (one == same).all()
    assert (one != other).any()
    assert set(np.unique(one)) == {0.0, 2.0}
