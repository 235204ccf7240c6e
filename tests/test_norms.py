"""Second derivatives of normalisation layers, against central differences in float64."""

import subprocess
import sys

import pytest
import torch
from cases import DTYPE, numbers
from torch.nn import functional as F

import functx
from functx._torch_norms import mend_batching_rules

X = numbers(2, 4, 3)
ROWS = (numbers(3, start=1.0) + 1.5, numbers(3, start=2.0))
CHANNELS = (numbers(4, start=1.0) + 1.5, numbers(4, start=2.0))
LAYERS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (3,), w, b), ROWS),
    "layer_norm of matrices": (
        lambda x, w, b: F.layer_norm(x, (4, 3), w, b),
        (numbers(4, 3, start=1.0) + 1.5, numbers(4, 3, start=2.0)),
    ),
    "layer_norm without weight": (lambda x: F.layer_norm(x, (3,)), ()),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), CHANNELS),
    "batch_norm in eval": (
        lambda x, w, b: F.batch_norm(x, numbers(4), numbers(4).exp(), w, b),
        CHANNELS,
    ),
    "batch_norm without weight": (lambda x: F.batch_norm(x, None, None, training=True), ()),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), CHANNELS),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), CHANNELS),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, (3,), w) + b, ROWS),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


def matrix(blocks, sizes):
    """Nested tuples of derivatives as one square matrix."""
    return torch.cat(
        [
            torch.cat([b.reshape(m, n) for b, n in zip(row, sizes)], 1)
            for row, m in zip(blocks, sizes)
        ]
    )


def differences(gradient, args, h=1e-5):
    """The matrix of second derivatives, column by column, by central differences."""
    columns = []
    for k, arg in enumerate(args):
        for unit in torch.eye(arg.numel(), dtype=DTYPE).view(-1, *arg.shape):
            there, back = (
                torch.cat(
                    [g.flatten() for g in gradient(*args[:k], arg + s * unit, *args[k + 1 :])]
                )
                for s in (h, -h)
            )
            columns.append((there - back) / (2 * h))
    return torch.stack(columns, 1)


def loss(f):
    return lambda *args: (f(*args).sin() * numbers(*X.shape, start=0.3)).sum()


WAYS = {
    "hessian": lambda f, n: functx.hessian(f, argnums=n),
    "jacrev of jacrev": lambda f, n: functx.jacrev(functx.jacrev(f, argnums=n), argnums=n),
    "jacrev of grad": lambda f, n: functx.jacrev(functx.grad(f, argnums=n), argnums=n),
    "jacfwd of grad": lambda f, n: functx.jacfwd(functx.grad(f, argnums=n), argnums=n),
    "jacrev of jacfwd": lambda f, n: functx.jacrev(functx.jacfwd(f, argnums=n), argnums=n),
    "jacfwd of jacfwd": lambda f, n: functx.jacfwd(functx.jacfwd(f, argnums=n), argnums=n),
    "hessian of torch.func": lambda f, n: torch.func.hessian(f, argnums=n),
}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives(layer, way, remat):
    mend_batching_rules()
    f, rest = loss(layer[0]), layer[1]
    args = (X, *rest)
    numbers_of = tuple(range(len(args)))
    expected = differences(functx.grad(f, argnums=numbers_of), args)
    found = WAYS[way](functx.remat(f) if remat else f, numbers_of)(*args)
    torch.testing.assert_close(
        matrix(found, [a.numel() for a in args]), expected, rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("outer", ["grad", "jvp", "backward"])
def test_per_example_gradients_are_differentiable(layer, outer):
    """``grad(vmap(grad(f)))``, against a loop over the examples."""
    f, rest = loss(layer[0]), layer[1]
    args = (torch.stack([X, X.cos()]), *rest)
    numbers_of = tuple(range(len(args)))
    gradient = functx.grad(f, argnums=numbers_of)

    def batched(x, *rest):
        return functx.vmap(gradient, in_dims=(0, *(None for _ in rest)))(x, *rest)

    def looped(x, *rest):
        return [torch.stack(g) for g in zip(*(gradient(one, *rest) for one in x))]

    def derivative(of):
        def value(*args):
            return sum((g * numbers(*g.shape, start=0.7)).sum() for g in of(*args))

        if outer == "jvp":
            return functx.jvp(value, args, tuple(a.cos() for a in args))[1]
        if outer == "grad":
            return functx.grad(value, argnums=numbers_of)(*args)
        leaves = [a.clone().requires_grad_() for a in args]
        return torch.autograd.grad(value(*leaves), leaves)

    torch.testing.assert_close(derivative(batched), derivative(looped), rtol=1e-10, atol=1e-11)


def test_first_derivatives_are_those_of_torch_bit_by_bit():
    """In a process of its own, before and after the rules are replaced; and nothing is printed."""
    code = """
import torch
from torch.nn import functional as F
from functx._torch_norms import mend_batching_rules
found = []
for _ in range(2):
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, w, c = torch.randn(5, 2, 4, 3), torch.rand(5, 3), torch.rand(5, 4)
        x, w, c = (t.to(dtype) for t in (x, w, c))
        for f, v in ((lambda x, w: F.layer_norm(x, (3,), w, w), w),
                     (lambda x, w: F.batch_norm(x, None, None, w, w, training=True), c),
                     (lambda x, w: F.instance_norm(x, None, None, w, w), c)):
            for dims in ((0, 0), (0, None), (None, 0)):
                args = [t if d == 0 else t[0] for t, d in zip((x, v), dims)]
                g = torch.func.grad(lambda x, w: f(x, w).float().sin().sum(), argnums=(0, 1))
                found += torch.func.vmap(g, in_dims=dims)(*args)
    mend_batching_rules()
half = len(found) // 2
assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:])) and half
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_rules_are_replaced_once():
    mend_batching_rules()
    mend_batching_rules()
