"""Activations; torch decomposes their backward operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._to_jax.rules.table import rule, rules


@rule("gelu")
def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + jnp.tanh(inner))
    return x * 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))


@rule("elu")
def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    # The unused branch must not overflow: its zero-weighted derivative would be NaN.
    low = jnp.where(x > 0, 0.0, x)
    return jnp.where(x > 0, x * scale, jnp.expm1(low * input_scale) * (alpha * scale))


@rule("softplus")
def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * beta
    low = jnp.where(scaled > threshold, 0.0, scaled)
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(low)) / beta)


@rule("hardtanh")
def _hardtanh(x: Any, min_val: float = -1, max_val: float = 1) -> Any:
    # Unlike clamp, the derivative at the bounds is zero.
    return jnp.where(x <= min_val, min_val, jnp.where(x >= max_val, max_val, x))


def _normalized(normalize: Callable[..., Any]) -> Callable[..., Any]:
    def rule(x: Any, dim: int, half_to_float: bool = False, *, ctx: Any) -> Any:
        # 16-bit inputs are summed in float32, as torch's kernels do.
        x = x.astype(jnp.promote_types(ctx.dtype, jnp.float32))
        return normalize(x, dim) if x.ndim else normalize(x[None], 0)[0]

    return rule


_softmax = _normalized(jax.nn.softmax)
rules({"_softmax": _softmax, "_log_softmax": _normalized(jax.nn.log_softmax)})


@rule("_safe_softmax")
def _safe_softmax(x: Any, dim: int, dtype: Any = None, *, ctx: Any) -> Any:
    # A row of -inf gives zeros, and its derivative is zero, not NaN.
    dead = jnp.max(x, dim, keepdims=True) == -jnp.inf
    return jnp.where(dead, 0, _softmax(jnp.where(dead, 0, x), dim, ctx=ctx))


rules(
    {
        "celu": lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1.0 / alpha),
        "hardsigmoid": lambda x: _hardtanh(x + 3, 0, 6) / 6,
        "hardswish": lambda x: jnp.where(x <= -3, 0.0, jnp.where(x < 3, x * (x + 3) / 6, x)),
        "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
        "relu": lambda x: jnp.where(x <= 0, jnp.zeros_like(x), x),
        "silu": jax.nn.silu,
    }
)
