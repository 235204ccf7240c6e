"""Derivatives of from_jax functions, where it is easy to be silently wrong, and in the compiler."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import functx
from functx import memory
from functx._core.errors import LoweringError
from functx.compat import from_jax
from functx.compat._from_jax.torch_operator import program_of

from ..helpers import assert_close

# Memory formats of forward mode are compared with a loop that warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Input #",
    *("ignore::UserWarning", "ignore::DeprecationWarning"),  # which are the compiler's own business
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_all_modes_are_those_of_finite_differences(dtype):
    f = from_jax(lambda a, b: jnp.sin(a) * b.conj(), enable_x64=True)
    leaves = [torch.randn(2, dtype=dtype).requires_grad_() for _ in range(2)]
    batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True, **batched)
    assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_custom_derivative_rules_are_kept():
    @jax.custom_vjp
    def g(x):
        return 2 * x

    g.defvjp(lambda x: (2 * x, x), lambda x, ct: (100 * x * ct,))
    x = torch.full((2,), 3.0, requires_grad=True)
    (first,) = torch.autograd.grad(from_jax(g)(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.tolist() == [300, 300]
    assert second.tolist() == [100, 100]
    with pytest.raises(TypeError, match="jvp"):
        torch.func.jvp(from_jax(g), (x.detach(),), (x.detach(),))


def test_what_has_no_reverse_mode_raises_only_when_asked():
    f = from_jax(lambda x: jax.lax.while_loop(lambda y: (y < 10).all(), lambda y: 2 * y, x))
    x = torch.ones(2, requires_grad=True)
    y = f(x)
    assert y.tolist() == [16, 16]
    assert torch.func.jvp(f, (x.detach(),), (x.detach(),))[1].tolist() == [16, 16]
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        y.sum().backward()


LOOPS = {
    "while": lambda x: jax.lax.while_loop(lambda y: (y < 9).all(), lambda y: y * y + jnp.sin(y), x),
    "fori": lambda x: jax.lax.fori_loop(0, jnp.int32(x.size), lambda i, y: jnp.sin(y) * 1.5, x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_has_no_reverse_mode_can_be_linearized(name):
    f, x, t = from_jax(LOOPS[name]), torch.linspace(1, 2, 3), torch.linspace(2, 3, 3)
    around = lambda f, sin: lambda x: sin(f(x * x)) + x
    ours, linear = functx.linearize(around(f, torch.sin), x)
    expected, moved = jax.jvp(around(LOOPS[name], jnp.sin), (x.numpy(),), (t.numpy(),))
    assert_close(ours, expected, rtol=1e-5)
    assert_close(linear(t), moved, rtol=1e-5)
    assert_close(torch.vmap(linear)(torch.stack([t, -t])), np.stack([moved, -moved]), rtol=1e-5)
    second = functx.jvp(lambda x: functx.linearize(f, x)[1](t), (x,), (t,))[1]
    in_jax = lambda x: jax.jvp(LOOPS[name], (x,), (t.numpy(),))[1]
    assert_close(second, jax.jvp(in_jax, (x.numpy(),), (t.numpy(),))[1], rtol=1e-4)


def test_a_gradient_inside_of_what_is_linearized_still_asks_for_a_reverse_mode():
    f = from_jax(LOOPS["while"])
    _, linear = functx.linearize(lambda x: f(x).sum().expand(2), torch.ones(2))
    assert linear(torch.ones(2)).shape == (2,)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        functx.linearize(functx.grad(lambda x: f(x).sum()), torch.ones(2))


def test_in_place_writes_before_the_backward_are_noticed():
    for f, written in ((jnp.exp, lambda x, y: y), (jnp.sin, lambda x, y: x)):
        x = torch.ones(2, requires_grad=True) * 1
        y = from_jax(f)(x)
        written(x, y).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_backward_runs_under_the_settings_of_its_forward():
    f = from_jax(lambda x: jnp.sin(x) * 1e-30)
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with jax.enable_x64(True):
        y = f(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, torch.cos(x) * 1e-30, rtol=1e-14, atol=0)
    torch.testing.assert_close(second, -torch.sin(x.detach()) * 1e-30, rtol=1e-14, atol=0)


def test_no_grad_and_inference_mode_are_heeded():
    f = from_jax(jnp.sin)
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not f(x).requires_grad
    with torch.inference_mode():
        y = f(x)
    assert not y.requires_grad
    torch.testing.assert_close(f(y), torch.sin(torch.sin(x.detach())))


def test_threads_share_one_trace():
    traces, together = [], threading.Barrier(4)

    def g(x):
        traces.append(1)
        time.sleep(0.1)  # long enough for the other threads to come
        return jnp.sin(x)

    f = from_jax(g)

    def work(_):
        together.wait()
        x = torch.ones(3, requires_grad=True)
        f(x).sum().backward()
        return x.grad

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(work, range(4))
    assert all(torch.equal(g, first) for g in others)
    assert len(traces) == 1


def test_what_all_examples_share_is_kept_once():
    w, xs = torch.randn(64, 64), torch.randn(50, 64)
    f = from_jax(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(w) @ x)))
    one = w.numel() * 4
    peak = memory.peak(lambda: functx.grad(lambda w: torch.vmap(f, (None, 0))(w, xs).sum())(w))
    assert peak < 6 * one + 20 * xs.numel() * 4


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(f, **options):
    return torch.compile(f, backend="aot_eager", **options)


def test_structures_numbers_and_none_are_in_the_graph():
    def g(tree, scale, *, shift=None, mode="double", n=1):
        factor = 2 if mode == "double" else 1
        y = tree["x"] * scale * factor * n
        return {"a": y if shift is None else y + shift, "b": [tree["y"]]}

    f = from_jax(g, static_argnames="n")
    run = compiled(lambda tree: f(tree, 3.0, shift=None, n=2)["a"] + 1, fullgraph=True)
    assert run({"x": torch.ones(2), "y": torch.ones(3)}).tolist() == [13, 13]


def test_each_shape_and_number_is_a_signature():
    f = from_jax(lambda x, s: x.sum() * s * jnp.ones(x.shape))
    run = compiled(lambda x, s: f(x, s) * 2, dynamic=True)
    for n in range(2, 5):
        for s in (n / 2, n):
            assert run(torch.ones(n), s).tolist() == [2.0 * n * s] * n


@pytest.mark.parametrize("where", ["argument", "closure"])
def test_a_key_breaks_the_graph(where):
    key = jax.random.key(0)
    f = from_jax(lambda key, x: x * jax.random.normal(key, x.shape))
    x = torch.ones(3, requires_grad=True)
    if where == "argument":
        y = compiled(lambda key, x: f(key, x) * 1)(key, x)
    else:
        y = compiled(lambda x: f(key, x) * 1)(x)
    y.sum().backward()
    assert torch.equal(y, f(key, x))
    assert torch.equal(x.grad, f(key, torch.ones(3)))


# Slow: inductor writes and compiles C++.
def test_inductor_compiles_forward_and_backward():
    compiled = (lambda f: torch.compile(lambda x: 2 * f(x), fullgraph=True))(from_jax(jnp.sin))
    gc.collect()  # the graph keeps the function
    x = torch.ones(2, requires_grad=True)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.cos(x.detach()))


def test_a_transform_of_it_compiles():
    f = from_jax(lambda w, x: (w * x**2).sum())
    w, x = torch.ones(3), torch.randn(4, 3)
    expected = x.square()
    for t in (torch.func, functx):
        per_example = t.vmap(t.grad(f), (None, 0))
        step = compiled(lambda w, x: per_example(w, x))  # noqa: B023
        told = pytest.warns(RuntimeWarning, match=r"functx\.jit") if t is functx else nullcontext()
        with told:
            torch.testing.assert_close(step(w, x), expected)


def test_it_is_a_call_in_traced_and_exported_graphs():
    f = from_jax(jnp.sin)
    graph = make_fx(torch.func.grad(lambda x: f(x).sum()))(torch.ones(3))
    assert "functx.jax_call" in graph.code
    torch.testing.assert_close(graph(torch.zeros(3)), torch.ones(3))

    class Net(torch.nn.Module):
        def forward(self, x):
            return f(x) * 2

    exported = torch.export.export(Net(), (torch.ones(3),))
    torch.testing.assert_close(exported.module()(torch.zeros(3)), torch.zeros(3))


def test_a_graph_of_another_process_is_refused():
    with pytest.raises(LoweringError, match=r"not in this process.*saved and loaded"):
        program_of("sin 0123456789abcdef")
