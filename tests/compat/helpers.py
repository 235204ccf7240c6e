"""Arrays of tensors, comparisons, and counts in compiled programs."""

import re

import jax
import numpy as np
import torch
from cases import dense

import functx
from functx.compat._bridge import array_from_torch
from functx.compat._jax import KEEP_RECOMPUTE


def arrays(tree):
    """A pytree of tensors as JAX arrays."""
    return jax.tree_util.tree_map(array_from_torch, tree)


def assert_close(got, expected, rtol=2e-6):
    """Compare pytrees of arrays, of JAX or torch, relative to the largest entry of each."""
    a, b = jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(expected)
    for x, y in zip(a, b, strict=True):
        x, y = (np.asarray(v.detach() if isinstance(v, torch.Tensor) else v) for v in (x, y))
        assert x.shape == y.shape
        scale = max(np.abs(y).max(initial=0), 1e-2)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale)


def count_dots(f, *args, barriers=True):
    """Matrix products in the compiled program; by default with recomputations kept."""
    options = KEEP_RECOMPUTE if barriers else None
    text = jax.jit(f).lower(*args).compile(compiler_options=options).as_text()
    return len(re.findall(r"\bdot\(", text))


def as_usual(f):
    """``jax.jit(f)``, coded as XLA codes by itself, also where ``make test`` has it done quickly.

    The bits of a product and a sum depend on it: the usual code rounds them once.
    """
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 3})


WIDTH, BATCH, LAYERS = 8, 4, 8


def weights(layers=LAYERS):
    """Of square layers; and their input."""
    torch.manual_seed(0)
    return [torch.randn(WIDTH, WIDTH) / 3 for _ in range(layers)], torch.randn(BATCH, WIDTH)


def chain(segment):
    """An MLP cut into regions of ``segment`` layers; 0 is no region."""

    def run(x, *ws):
        return dense(ws, x)

    def net(ws, x):
        for i in range(0, LAYERS, segment or LAYERS):
            part = ws[i : i + (segment or LAYERS)]
            x = functx.remat(run)(x, *part) if segment else run(x, *part)
        return (x * x).sum()

    return net
