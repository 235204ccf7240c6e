"""What is compiled takes no more memory than with regions in eager."""

import pytest
import torch
from budget.networks import Residual
from cases import numbers
from references import gradients
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import functx
from functx import checkpoint_policies as cp
from functx._core.memory_tracker import Allocations

LAYERS, ROWS, WIDTH = 12, 64, 32
WEIGHTS = [numbers(WIDTH, WIDTH, start=float(i)) / 4 for i in range(LAYERS)]
X = numbers(ROWS, WIDTH)


def peak(f, x):
    """Of what is allocated, in eager too: workspace of kernels counts."""
    with Allocations() as found:
        f(x)
    return found.peak


def stack(body, every=3, **options):
    region = functx.remat(lambda x, *ws: _through(body, x, ws), **options)

    def loss(weights, x):
        for i in range(0, LAYERS, every):
            x = region(x, *weights[i : i + every])
        return x.square().mean()

    return loss


def _through(body, x, weights):
    for w in weights:
        x = body(x, w)
    return x


def layer(x, w):
    return torch.tanh(x @ w)


def waves(x, w):
    return torch.sin(torch.tanh(functx.checkpoint_name(x, "x"))) @ w


def pointwise(x, w):
    return torch.sin(x * w.sum(0)).exp().tanh() + torch.cos(x)


def blocks(make, *shape):
    torch.manual_seed(0)
    net = nn.Sequential(*[make() for _ in range(4)]).double()
    params = dict(net.named_parameters())
    functx.apply_remat(net, type(net[0]))
    loss = lambda params, x: functx.functional_call(net, params, (x,)).square().mean()
    return lambda x: functx.grad(loss)(params, x.reshape(shape))


def convolutions():
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))


def hvp(loss):
    return lambda x: functx.jvp(functx.grad(lambda x: loss(WEIGHTS, x)), (x,), (x,))[1]


def outside(loss):
    return lambda x: gradients(lambda x: loss(WEIGHTS, x), x)


in_math = sdpa_kernel(SDPBackend.MATH)  # fused attention has one derivative
by_data = lambda loss: functx.grad(lambda x: loss(WEIGHTS, x))
by_weights = lambda loss: lambda x: functx.grad(loss)(WEIGHTS, x)
PROGRAMS = {
    "layers by data": by_data(stack(layer)),
    "layers by weights": by_weights(stack(layer)),
    "waves": by_data(stack(waves, 1)),
    "pointwise": by_data(stack(pointwise)),
    "dots": by_weights(stack(waves, policy=cp.dots_saveable)),
    "names": by_weights(stack(waves, policy=cp.save_only_these_names("x"))),
    "budget": by_data(stack(layer, 12, budget=0.7)),
    "per example": lambda x: functx.vmap(functx.grad(stack(layer)), (None, 0))(WEIGHTS, x),
    "transformer": in_math(blocks(lambda: Residual(WIDTH), 2, ROWS // 2, WIDTH)),
    "convolutions": blocks(convolutions, 4, 2, 16, 16),
    "HVP": hvp(stack(layer)),
    "hessian": lambda x: functx.hessian(lambda x: stack(layer)(WEIGHTS, x[None]))(x[0]),
}
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]
QUICK = ("layers by weights", "names", "budget", "HVP")
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.sweep) for n in PROGRAMS]


@pytest.mark.filterwarnings("ignore:.torch._prims_common.check:FutureWarning")  # in inductor
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_stack_keeps_the_peak_of_eager(name, backend):
    f = PROGRAMS[name]
    jitted = functx.jit(f, backend=backend)
    torch.testing.assert_close(jitted(X), f(X), rtol=1e-9, atol=1e-12)
    assert peak(jitted, X) <= 1.02 * peak(f, X) + 256


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("body", [layer, waves])
def test_a_backward_from_outside_keeps_it(body, backend):
    loss = stack(body)
    eager, compiled = outside(loss), outside(functx.jit(loss, backend=backend))
    torch.testing.assert_close(compiled(X), eager(X), rtol=1e-9, atol=1e-12)
    # (Other code holds what it is given until it returns.)
    held = 0 if backend == "inductor" else X.nbytes
    assert peak(compiled, X) <= 1.02 * peak(eager, X) + held + 256
