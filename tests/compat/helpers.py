"""Arrays of tensors, comparisons, and counts in compiled programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from functx.compat._dlpack import array_from_torch
from functx.compat._jax import KEEP_RECOMPUTE


def arrays(tree: Any) -> Any:
    """A pytree of tensors as JAX arrays."""
    return jax.tree_util.tree_map(array_from_torch, tree)


def assert_close(got: Any, expected: Any, rtol: float = 2e-6) -> None:
    """Compare a pytree of JAX arrays with one of torch tensors, relative to the largest entry."""
    a, b = jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(expected)
    assert len(a) == len(b)
    for x, y in zip(a, b):
        y = y.detach().numpy()
        assert x.shape == y.shape
        scale = max(np.abs(y).max(initial=0), 1e-2)
        np.testing.assert_allclose(np.asarray(x), y, rtol=0, atol=rtol * scale)


def count_dots(f: Callable[..., Any], *args: Any, barriers: bool = True) -> int:
    """Matrix products in the compiled program; by default with recomputations kept."""
    options = KEEP_RECOMPUTE if barriers else None
    text = jax.jit(f).lower(*args).compile(compiler_options=options).as_text()
    return len(re.findall(r"\bdot\(", text))


def as_usual(f: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit(f)``, coded as XLA codes by itself, also where ``make test`` has it done quickly.

    The bits of a product and a sum depend on it: the usual code rounds them once.
    """
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 3})
