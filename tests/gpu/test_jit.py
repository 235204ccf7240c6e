"""Compiled functions on a device: values, gradients and peaks are those of eager, with regions."""

import functools

import pytest
import torch

import functx
from functx.memory import peak

LAYERS, WIDTH, ROWS = 8, 128, 2048
# Inductor writes kernels for the device; on the CPU the graph is what is tested here.
BACKEND = {"cuda": "inductor", "cpu": "aot_eager"}


def loss(weights, x):
    region = functx.remat(lambda w, x: torch.tanh(x @ w))
    for w in weights:
        x = region(w, x)
    return x.square().mean()


def arguments(device):
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5 for _ in range(LAYERS)]
    return weights, torch.randn(ROWS, WIDTH, device=device)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("way", ["grad", "vmap", "hvp", "backward"])
def test_what_is_compiled_is_what_eager_computes(way, device):
    weights, x = arguments(device)
    gradient = functx.grad(loss)

    def run(jit):
        if way == "grad":
            return jit(gradient)(weights, x)
        if way == "vmap":
            return jit(functx.vmap(gradient, (None, 0)))(weights, x[:16])
        if way == "hvp":
            product = lambda w, x: functx.jvp(lambda w: gradient(w, x), (w,), (w,))[1]
            return jit(product)(weights, x)
        leaves = [w.clone().requires_grad_() for w in weights]
        return torch.autograd.grad(jit(loss)(leaves, x), leaves)

    jit = functools.partial(functx.jit, backend=BACKEND[device])
    for ours, expected in zip(run(jit), run(lambda f: f)):
        assert ours.device.type == device
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_a_compiled_gradient_peaks_no_higher_than_in_eager(device):
    weights, x = arguments(device)
    eager = functx.grad(loss)
    compiled = functx.jit(eager, backend=BACKEND[device])
    compiled(weights, x)
    eager(weights, x)
    assert peak(compiled, weights, x) <= peak(eager, weights, x)


def test_draws_of_a_compiled_function_are_those_of_the_device_generator(device):
    x = torch.ones(512, 64, device=device)
    region = functx.remat(lambda x: torch.nn.functional.dropout(x.sin(), 0.5))
    f = functx.grad_and_value(lambda x: region(x).sum())
    f = functx.jit(f, backend=BACKEND[device])
    torch.manual_seed(3)
    (gradient, value), (again, _) = f(x), f(x)
    kept = gradient != 0
    torch.testing.assert_close(gradient, torch.where(kept, 2 * x.cos(), 0))
    torch.testing.assert_close(value, (2 * x.sin() * kept).sum())
    assert not torch.equal(kept, again != 0)
    torch.manual_seed(3)
    assert torch.equal(f(x)[0], gradient)
