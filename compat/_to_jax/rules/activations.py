"""Activations, and the backward operations of those that are defined piecewise.

Where two pieces meet, the slope is that of the left one, and the derivative of the slope is zero,
as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
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


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    low = jnp.minimum(x, 0)  # the unused branch must not overflow
    return jnp.where(x > 0, x * scale, jnp.expm1(low * input_scale) * (alpha * scale))


@_elu.defjvp
def _elu_jvp(alpha: float, scale: float, input_scale: float, xs: Any, dxs: Any) -> Any:
    out = _elu(xs[0], alpha, scale, input_scale)
    return out, dxs[0] * _elu_slope(xs[0], alpha, scale, input_scale)


def _elu_slope(x: Any, alpha: float, scale: float, input_scale: float) -> Any:
    low = jnp.where(x < 0, x, 0)
    return jnp.where(x <= 0, jnp.exp(low * input_scale) * (alpha * scale * input_scale), scale)


@rule("elu_backward")
def _elu_backward(
    g: Any, alpha: float, scale: float, input_scale: float, is_result: bool, x: Any
) -> Any:
    if is_result:
        return g * jnp.where(x <= 0, (x + alpha * scale) * input_scale, scale)
    return g * _elu_slope(x, alpha, scale, input_scale)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * beta
    low = jnp.where(scaled > threshold, 0.0, scaled)
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(low)) / beta)


@_softplus.defjvp
def _softplus_jvp(beta: float, threshold: float, xs: Any, dxs: Any) -> Any:
    return _softplus(xs[0], beta, threshold), _softplus_backward(dxs[0], xs[0], beta, threshold)


@rule("softplus_backward")
def _softplus_backward(g: Any, x: Any, beta: float, threshold: float) -> Any:
    scaled = x * beta
    slope = jax.nn.sigmoid(jnp.where(scaled < threshold, scaled, threshold))
    return g * jnp.where(scaled > threshold, 1.0, slope)


@rule("log_sigmoid_forward")
def _log_sigmoid(x: Any, *, ctx: Any) -> Any:
    # torch's decomposition adds two functions with a kink at zero. This formula is smooth.
    return jax.nn.log_sigmoid(x), jnp.zeros(ctx.node.meta["val"][1].shape, x.dtype)


@rule("log_sigmoid_backward")
def _log_sigmoid_backward(g: Any, x: Any, buffer: Any) -> Any:
    return g * jax.nn.sigmoid(-x)


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
    # A row of -inf gives zeros, with a derivative of zero. The ordinary softmax would give NaN.
    dead = jnp.max(x, dim, keepdims=True) == -jnp.inf
    return jnp.where(dead, 0, _softmax(jnp.where(dead, 0, x), dim, ctx=ctx))


rules(
    {
        "elu": _elu,
        "softplus": _softplus,
        "celu": lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1.0 / alpha),
        "hardsigmoid": lambda x: _hardtanh(x + 3, 0, 6) / 6,
        "hardswish": lambda x: jnp.where(x <= -3, 0.0, jnp.where(x < 3, x * (x + 3) / 6, x)),
        "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
        "relu": lambda x: jnp.where(x <= 0, jnp.zeros_like(x), x),
        "silu": jax.nn.silu,
    }
)
