"""A lowered function under JAX's transforms, with torch's inside, on devices; when it is traced."""

import collections
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from torch.fx import traceback

import functx
from functx._core.errors import LoweringError
from functx.compat import to_jax

from ..helpers import arrays, assert_close

X = torch.linspace(-1.0, 1.0, 6)


f = lambda x: torch.tanh(x * 2) * x.flip(0)
loss = lambda x: f(x).sum()


def writes(x):
    y = x * 1
    y[1:3].mul_(x[1:3])
    y.view(-1)[0].add_(x[4])
    y[::2] = torch.sin(x[::2])
    return y


# Of jax, torch.func or functx, each with a function.
COMPOSITIONS = {
    "grad": (lambda of, g: of.grad(g), loss),
    "vmap(grad)": (lambda of, g: of.vmap(of.grad(g)), lambda x: torch.sin(x) * x),
    "jvp": (lambda of, g: lambda x: of.jvp(g, (x,), (x,))[1], f),
    "vjp": (lambda of, g: lambda x: of.vjp(g, x)[1](x)[0], f),
    "jvp(grad)": (lambda of, g: lambda x: of.jvp(of.grad(g), (x,), (x,))[1], loss),
    "grad(jvp)": (lambda of, g: of.grad(lambda y: of.jvp(g, (y,), (2 * y,))[1]), loss),
    "jacrev": (lambda of, g: of.jacrev(g), f),
    "jacrev of writes to views": (lambda of, g: of.jacrev(g), writes),
    "jacfwd": (lambda of, g: of.jacfwd(g), f),
    "hessian": (lambda of, g: of.hessian(g), loss),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_transform_of_jax_and_one_inside_also_of_a_region_are_that_of_torch(name):
    transform, g = COMPOSITIONS[name]
    expected = transform(torch.func, g)(X)
    assert_close(jax.jit(transform(jax, to_jax(g)))(arrays(X)), expected, rtol=1e-5)
    assert_close(jax.jit(to_jax(transform(functx, g)))(arrays(X)), expected, rtol=1e-5)
    inside = to_jax(transform(functx, functx.remat(g)))
    assert_close(jax.jit(inside)(arrays(X)), expected, rtol=1e-5)
    expected = torch.func.jacfwd(transform(torch.func, g))(X)
    assert_close(jax.jit(jax.jacrev(inside))(arrays(X)), expected, rtol=1e-5)


def test_in_jit_checkpoint_and_scan_it_is_the_function():
    lowered = to_jax(f)

    def repeated(x):
        return lax.scan(lambda c, _: (jax.checkpoint(lowered)(c), None), x, length=3)[0].sum()

    assert_close(jax.jit(lowered)(arrays(X)), f(X))
    found = jax.jit(jax.grad(repeated))(arrays(X))
    assert_close(found, torch.func.grad(lambda x: f(f(f(x))).sum())(X), rtol=1e-5)


def test_new_shapes_dtypes_and_statics_trace_again():
    traces = collections.deque()  # which is not looked into

    def g(x, flag):
        traces.append((tuple(x.shape), x.dtype, flag))
        return x + 1 if flag else x - 1

    h = to_jax(g)
    for x in (jnp.ones(2), jnp.ones(3), jnp.ones(3, jnp.float16), jnp.ones(3)):
        h(x, True)
    np.testing.assert_array_equal(h(jnp.ones(3), False), np.zeros(3))
    np.testing.assert_array_equal(h(jnp.ones(3), 1), 2 * np.ones(3))
    assert [*traces] == [
        ((2,), torch.float32, True),
        ((3,), torch.float32, True),
        ((3,), torch.float16, True),
        ((3,), torch.float32, False),
        ((3,), torch.float32, 1),  # which is not True
    ]


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


def _no_grad(x):
    with torch.no_grad():
        return x * 2


def _write(target, value):
    target[0] = value[0]
    return target


def _scaled(target, w):
    with torch.no_grad():
        target.detach().mul_(2)
    return target


WRITTEN = {
    "detached": lambda w, p: p.detach().add_(w),
    "detached, and read otherwise": lambda w, p: (p.detach().add_(w) * p).sin(),
    "twice": lambda w, p: p.detach().add_(w).mul_(w) + p,
    "data": lambda w, p: p.data.mul_(w) * w,
    "an entry": lambda w, p: _write(p.detach(), w) * p,
    "a view of it": lambda w, p: (p.detach().view(-1)[1:].add_(w[1:]) * p[1:]).cos(),
    "of a view": lambda w, p: p[:2].detach().add_(w[:2]) * p[1:],
    "made without grad": lambda w, p: _no_grad(p).add_(w) * p,
    "an entry, made without grad": lambda w, p: _write(_no_grad(p), w) * w,
    "without grad, and read otherwise": lambda w, p: _scaled(p, w) * w,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_derivative_goes_through_what_is_written_to_a_detached_tensor(name):
    """And what it was detached from gets the values, and keeps its derivative."""

    def f(w, x):
        return WRITTEN[name](w, x.sin()).square().sum()

    w, x = torch.randn(2, 3, dtype=torch.float64).unbind()
    leaves = w.clone().requires_grad_(), x.clone().requires_grad_()
    expected = torch.autograd.grad(f(*leaves), leaves, materialize_grads=True)
    with jax.enable_x64(True):
        found = jax.grad(to_jax(f), (0, 1))(w.numpy(), x.numpy())
        for a, b in zip(found, expected):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_tensor_and_its_detach_that_are_both_written_are_refused():
    def f(x):
        p = x.sin()
        q = p.detach()
        p.add_(1)
        return q.add_(p)

    with pytest.raises(LoweringError, match=r"both written to at .*test_transforms.py:\d+ in f"):
        to_jax(f)(jnp.ones(3))


def test_calls_share_the_array_of_what_is_closed_over():
    w, x = torch.zeros(2, 3, dtype=torch.int64), jnp.ones((2, 3))
    h = to_jax(lambda x: (x * w, w))
    consts = lambda: jax.make_jaxpr(lambda x: h(h(x)[0]))(x).consts
    (first,) = consts()
    (again,) = consts()
    assert again is first
    h(x)[1].delete()  # as a donation does
    assert h(x)[1].tolist() == w.tolist()
    w.data.add_(1)
    assert float(h(x)[0].sum()) == 6
    with jax.enable_x64(True):
        assert h(x)[1].dtype == jnp.int64


def test_a_module_and_what_is_closed_over_are_read_at_each_call():
    w, scale = torch.ones(3), 1
    closes_over = to_jax(lambda x: x * w * scale)
    assert closes_over(jnp.ones(3)).tolist() == [1, 1, 1]
    w.mul_(2)
    assert closes_over(jnp.ones(3)).tolist() == [2, 2, 2]
    w, scale = torch.full((3,), 2.0), 2
    assert closes_over(jnp.ones(3)).tolist() == [4, 4, 4]
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


class Settings(torch.nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.slope, self.held = torch.nn.LeakyReLU(0.1), {"of": [1.0], "w": torch.ones(())}

    def forward(self, x):
        return self.slope(-x) * self.scale * self.held["of"][0] * self.held["w"]


FACTOR = 1.0


def scaled(x):
    return x * FACTOR


def test_settings_that_change_are_seen_at_the_next_call(monkeypatch):
    net, x = Settings(), torch.ones(3)
    params, of_module = to_jax(net)
    h = to_jax(lambda x: scaled(net(x)))
    for change in (
        lambda: None,
        lambda: setattr(net, "scale", 3.0),
        lambda: setattr(net.slope, "negative_slope", 0.5),
        lambda: net.held["of"].__setitem__(0, 2.0),
        lambda: net.held.update(w=torch.full((), 5.0)),
        lambda: monkeypatch.setitem(globals(), "FACTOR", 2.0),
    ):
        change()
        assert_close(of_module(params, arrays(x)), net(x))
        assert_close(h(arrays(x)), scaled(net(x)))
    drop = torch.nn.Sequential(torch.nn.Dropout(0.0))
    params, f = to_jax(drop, rng=True)
    assert (f(jax.random.key(0), params, jnp.ones(9)) == 1).all()
    drop[0].p = 1.0
    assert (f(jax.random.key(0), params, jnp.ones(9)) == 0).all()


def test_a_counter_in_what_is_closed_over_traces_again_and_warns():
    held, n = types.SimpleNamespace(n=0), 0

    def in_an_attribute(x):
        held.n += 1
        return x * held.n

    def in_a_variable(x):
        nonlocal n
        n += 1
        return x * n

    for counts in (in_an_attribute, in_a_variable):
        h = to_jax(counts)
        assert [float(h(jnp.ones(()))) for _ in range(8)] == [*range(1, 9)]
        with pytest.warns(UserWarning, match=rf"{counts.__name__}.* traced 8 times.* as an array"):
            assert float(h(jnp.ones(()))) == 9
        assert [float(h(jnp.ones(()))) for _ in range(3)] == [10, 11, 12]
    h = to_jax(lambda x: x * n)
    for n in range(8):
        assert float(h(jnp.ones(()))) == n
    with warnings.catch_warnings(action="error"):
        n = 8
        with pytest.raises(UserWarning, match="traced 8 times"):
            h(jnp.ones(()))
        for n in (8, 9, 10):
            assert float(h(jnp.ones(()))) == n


def test_threads_trace_one_after_the_other():
    """The tracer keeps global state."""
    before = traceback.should_preserve_node_meta, dict(traceback.current_meta)
    tracing, w = threading.Semaphore(1), torch.ones(())

    def g(x, n):
        assert tracing.acquire(blocking=False)
        time.sleep(0.001)
        tracing.release()
        return x * n * w

    h = to_jax(g)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: float(h(jnp.ones(()), n)), range(16)))
    assert found == list(range(16))
    assert (traceback.should_preserve_node_meta, traceback.current_meta) == before


@pytest.mark.parametrize("most", [1, 128])
def test_programs_may_come_and_go_during_a_call(monkeypatch, most):
    """As other threads may make them, and drop all where there are too many."""
    monkeypatch.setattr(sys.modules[type(to_jax(f)).__module__], "_MOST_PROGRAMS", most)

    class Static:
        def __eq__(self, other):
            h(jnp.ones(()), next(others))
            return self is other

        def __hash__(self):
            h(jnp.ones(()), next(others))
            return id(self)

    others, h = itertools.count(), to_jax(lambda x, static: x + 1)
    for static in (Static(), Static()):
        assert float(h(jnp.ones(()), static)) == 2


def test_ambient_settings_trace_again():
    h = to_jax(lambda x: x @ x)
    x = jnp.ones((2, 2))
    assert h(x).dtype == jnp.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert h(x).dtype == jnp.bfloat16
    assert h(x).dtype == jnp.float32
    with torch.no_grad():  # JAX differentiates, whatever torch's mode
        assert float(jax.grad(to_jax(torch.sin))(0.0 * jnp.ones(()))) == 1


def test_a_function_that_is_dropped_is_freed():
    w = torch.ones(3)
    h = to_jax(lambda x: x * w)
    h(jnp.ones(3))
    ref = weakref.ref(h)
    del h
    gc.collect()
    assert ref() is None


ON_FOUR_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, torch, functx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from functx.compat import from_jax, to_jax

assert len(jax.devices()) == 4
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

def loss(w, x):
    h = functx.remat(lambda w, x: torch.tanh(x @ w))(w, x)
    return (h ** 2).sum()

f = to_jax(loss)
w = jnp.asarray(np.random.RandomState(0).randn(8, 8), jnp.float32) / 3
x = jnp.asarray(np.random.RandomState(1).randn(16, 8), jnp.float32)
expected = np.asarray(jax.jit(jax.grad(f))(w, x))
sharded = jax.device_put(x, rows)
got = jax.jit(jax.grad(f))(jax.device_put(w, whole), sharded)
np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
out = jax.jit(to_jax(lambda w, x: torch.tanh(x @ w)))(w, sharded)
assert out.sharding.is_equivalent_to(rows, 2)

exported = jax.export.export(jax.jit(f))(w, x)
np.testing.assert_allclose(exported.call(w, x), f(w, x), rtol=1e-5)

# from_jax gathers.
weights = jax.device_put(jnp.arange(4.0), rows)
assert from_jax(lambda: weights * 2)().tolist() == [0, 2, 4, 6]
assert from_jax(lambda w: w * 2)(weights).tolist() == [0, 2, 4, 6]
"""


# Slow: a process of its own.
@pytest.mark.sweep
def test_a_lowered_function_runs_on_four_devices():
    flags = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_FOUR_DEVICES]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
