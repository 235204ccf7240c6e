"""Where a derivative jumps, and at NaN, JAX gets torch's values and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from functx.compat import to_jax

NAN, INF = float("nan"), float("inf")
AT = torch.tensor([-2.0, -0.4, 0.0, -0.0, 1.0, NAN, INF, 3.0], dtype=torch.float64)
FINITE = torch.tensor([-2.0, -0.4, 0.3, 0.1, 1.0, 2.5], dtype=torch.float64)

AT_KINKS = {
    "abs": lambda x: x.abs(),
    "abs of complex": lambda x: torch.complex(x.nan_to_num(), 0 * x.nan_to_num()).abs(),
    "l1_loss": lambda x: torch.nn.functional.l1_loss(x, x.detach(), reduction="none"),
    "norm of zeros": lambda x: torch.linalg.vector_norm(x.nan_to_num() * 0, ord=INF),
    "sqrt of abs": lambda x: x.abs().sqrt(),
    "sign": lambda x: x.sign() * x,
    "sgn": lambda x: x.sgn() * x,
    "clamp": lambda x: x.clamp(0, 1),
    "clamp by a tensor": lambda x: torch.clamp(x, torch.zeros_like(x)),
    "clamp_max": lambda x: x.clamp_max(1.0),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "minimum": lambda x: torch.minimum(x, x.flip(0)),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of equals": lambda x: x[2:4].max() * x[4:5].min(),
}

OF_TWO = {
    "remainder": torch.remainder,
    "remainder of a number": lambda x, y: torch.remainder(torch.full_like(y, 2.0), y) * x,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "maximum with itself": lambda x, y: torch.maximum(x, x) * y,
}


def gradients(f, *args):
    args = [a.clone().requires_grad_() for a in args]
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)
    out = f(*args)
    return torch.autograd.grad((out * weights[: out.numel()].reshape(out.shape)).sum(), args)


def same(f, *args):
    with jax.enable_x64(True):
        arrays = [jnp.asarray(a.numpy()) for a in args]
        out, pull = jax.vjp(to_jax(f), *arrays)
        weights = jnp.arange(1.0, 9.0)[: out.size].reshape(out.shape)
        np.testing.assert_allclose(out, f(*args), rtol=1e-12)
        for ours, theirs in zip(pull(weights), gradients(f, *args)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.parametrize("name", AT_KINKS)
def test_of_one(name):
    same(AT_KINKS[name], AT)


@pytest.mark.parametrize("name", OF_TWO)
def test_of_two(name):
    same(OF_TWO[name], FINITE, FINITE.flip(0))
