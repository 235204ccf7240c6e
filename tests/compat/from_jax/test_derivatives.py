"""Derivatives of from_jax functions where it is easy to be silently wrong."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.autograd import forward_ad

import functx
from functx import memory
from functx.compat import from_jax

# Memory formats of forward mode are compared with a loop that warns.
pytestmark = pytest.mark.filterwarnings("ignore:Input #")


def mixed(a, b):
    return jnp.sin(a) * b.conj()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_all_modes_are_those_of_finite_differences(dtype):
    """All modes of plain autograd, batched ones among them."""
    f = from_jax(mixed, enable_x64=True)
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
    def g(x):
        return jax.lax.while_loop(lambda y: (y < 10).all(), lambda y: 2 * y, x)

    f = from_jax(g)
    x = torch.ones(2, requires_grad=True)
    y = f(x)
    assert y.tolist() == [16, 16]
    assert torch.func.jvp(f, (x.detach(),), (x.detach(),))[1].tolist() == [16, 16]
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        y.sum().backward()


def test_forward_and_reverse_mode_mix_in_plain_autograd():
    """Forward over reverse and reverse over forward, both at the level of plain autograd."""
    f = from_jax(lambda x: jnp.sin(x) * x, enable_x64=True)
    twin = lambda x: torch.sin(x) * x  # noqa: E731
    results = []
    for function in (f, twin):
        x = torch.linspace(0, 1, 3, dtype=torch.float64).requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.full_like(x, 2.0))
            out = function(dual)
            value, tangent = forward_ad.unpack_dual(out)
            (reverse_of_forward,) = torch.autograd.grad(tangent.sum(), x, retain_graph=True)
            (gradient,) = torch.autograd.grad(out.sum(), dual, create_graph=True)
            forward_of_reverse = forward_ad.unpack_dual(gradient).tangent
            (last,) = torch.autograd.grad(out.square().sum(), dual)
            forward_of_last = forward_ad.unpack_dual(last).tangent
        results.append([value, tangent, reverse_of_forward, forward_of_reverse, forward_of_last])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_in_place_writes_before_the_backward_are_noticed():
    x = torch.ones(2, requires_grad=True)
    result = from_jax(jnp.exp)(x)
    result.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    argument = x * 1
    result = from_jax(jnp.sin)(argument)
    argument.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


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
    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(w) @ x))

    w, xs = torch.randn(64, 64), torch.randn(50, 64)
    f = from_jax(loss)
    one = w.numel() * 4
    peak = memory.peak(lambda: functx.grad(lambda w: torch.vmap(f, (None, 0))(w, xs).sum())(w))
    assert peak < 6 * one + 20 * xs.numel() * 4


def test_a_region_keeps_only_its_inputs():
    def network(layer):
        def run():
            y = torch.ones(10_000).requires_grad_()
            for _ in range(8):
                y = layer(y)
            y.sum().backward()

        return memory.peak(run) / 40_000

    f = from_jax(lambda x: jnp.sin(jnp.exp(jnp.tanh(x))))
    network(f)
    assert network(f) > 24
    assert network(functx.remat(f)) < 16
