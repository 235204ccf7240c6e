"""XLA's compiled programs: kept recomputations, counted products, temporary bytes.

XLA's CPU compiler expands the barriers of ``jax.checkpoint`` and then merges the recomputation with
the forward pass, so that an unrolled network keeps every activation.  Leaving out one pass prevents
that.  The pass is no public name and an unknown one is ignored without a word, so whether leaving
it out works is found out by compiling a small network both ways.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from functx.compat._jax import KEEP_RECOMPUTE, RECOMPUTED

# A product of which nothing is summed (an outer one) is a multiplication that was a dot.
_PRODUCT = re.compile(
    r"\b(?:dot|convolution)\("
    r"|custom_call_target=\"[^\"]*(?:matmul|gemm|conv)"
    r"|\bmultiply\(.*op_name=\"[^\"]*/dot_general\""
)
_LAYERS = 4


@functools.cache
def keep_recompute() -> tuple[dict[str, str] | None, bool]:
    """Compiler options under which a recompute stays one, and whether it does stay."""
    if jax.default_backend() != "cpu":
        return None, _recomputes(None)
    return dict(KEEP_RECOMPUTE), _recomputes(dict(KEEP_RECOMPUTE))


def _recomputes(options: Any) -> bool:
    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w, x)
        return (x * x).sum()

    args = [jnp.ones((8, 8), "float32")] * _LAYERS, jnp.ones((4, 8), "float32")
    program = jax.jit(jax.grad(loss)).lower(*args).compile(compiler_options=options)
    plain = 2 * _LAYERS + 4 * _LAYERS - 1
    return count_products(program)[0] > plain


def compiled(f: Callable[..., Any], *args: Any) -> Any:
    """Compile a JAX function for arguments, so that a recompute stays one.

    Returns:
        The compiled program, to be called with such arguments.
    """
    options: Any = keep_recompute()[0]
    return jax.jit(f).lower(*args).compile(compiler_options=options)


def count_products(program: Any) -> tuple[int, int]:
    """Matrix products and convolutions in a compiled program, and how many of them run again."""
    found = [line for line in program.as_text().splitlines() if _PRODUCT.search(line)]
    return len(found), sum(RECOMPUTED in line for line in found)


def temporary_bytes(program: Any) -> int:
    """Bytes of the temporary buffers of a compiled program."""
    return int(program.memory_analysis().temp_size_in_bytes)
