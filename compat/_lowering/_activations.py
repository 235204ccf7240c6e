"""Activations and their backward operations, which are differentiable again."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._lowering._table import rule


@rule("relu")
def _relu(x: Any) -> Any:
    return jnp.where(x <= 0, jnp.zeros_like(x), x)


@rule("threshold_backward")
def _threshold_backward(g: Any, x: Any, threshold: float) -> Any:
    return jnp.where(x <= threshold, jnp.zeros_like(g), g)


@rule("threshold")
def _threshold(x: Any, threshold: float, value: float) -> Any:
    return jnp.where(x <= threshold, jnp.asarray(value, x.dtype), x)


@rule("sigmoid_backward", cast=True)
def _sigmoid_backward(g: Any, y: Any) -> Any:
    return g * jnp.conj((1 - y) * y)


@rule("tanh_backward", cast=True)
def _tanh_backward(g: Any, y: Any) -> Any:
    return g * jnp.conj(1 - y * y)


@rule("gelu")
def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + jnp.tanh(inner))
    return x * 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))


@rule("gelu_backward")
def _gelu_backward(g: Any, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return jax.vjp(lambda x: _gelu(x, "tanh"), x)[1](g)[0]
    cdf = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    pdf = math.sqrt(0.5 / math.pi) * jnp.exp(-0.5 * x * x)
    return g * (cdf + x * pdf)


@rule("silu")
def _silu(x: Any) -> Any:
    return x * jax.nn.sigmoid(x)


@rule("silu_backward")
def _silu_backward(g: Any, x: Any) -> Any:
    s = jax.nn.sigmoid(x)
    return g * s * (1 + x * (1 - s))


@rule("leaky_relu")
def _leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    return jnp.where(x > 0, x, x * negative_slope)


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


@rule("hardsigmoid")
def _hardsigmoid(x: Any) -> Any:
    return _hardtanh(x + 3, 0, 6) / 6


@rule("hardswish")
def _hardswish(x: Any) -> Any:
    return jnp.where(x <= -3, 0.0, jnp.where(x < 3, x * (x + 3) / 6, x))


@rule("log_sigmoid_forward", context=True)
def _log_sigmoid(x: Any, *, ctx: Any) -> Any:
    z = jnp.exp(-jnp.abs(x))
    # The second result is a buffer for the backward, which is empty on some devices.
    kept = z if tuple(ctx.node.meta["val"][1].shape) == x.shape else jnp.zeros((0,), x.dtype)
    return jnp.minimum(x, 0) - jnp.log1p(z), kept


@rule("prelu", "_prelu_kernel")
def _prelu(x: Any, weight: Any) -> Any:
    return jnp.where(x > 0, x, weight * x)


@rule("celu")
def _celu(x: Any, alpha: float = 1.0) -> Any:
    return _elu(x, alpha, 1.0, 1.0 / alpha)


@rule("mish")
def _mish(x: Any) -> Any:
    return x * jnp.tanh(jax.nn.softplus(x))


@rule("glu")
def _glu(x: Any, dim: int = -1) -> Any:
    a, b = jnp.split(x, 2, dim)
    return a * jax.nn.sigmoid(b)


def _exps(x: Any, dim: int) -> tuple[Any, Any]:
    # The maximum shifts values only; its derivative cancels.
    shifted = x - lax.stop_gradient(jnp.max(x, dim, keepdims=True)) if x.ndim else x - x
    return shifted, jnp.exp(shifted)


@rule("_softmax", cast=False, context=True)
def _softmax(x: Any, dim: int, half_to_float: bool = False, *, ctx: Any) -> Any:
    x = _wide(x, ctx.dtype)
    if x.size == 0:
        return x
    _, e = _exps(x, dim)
    return e / jnp.sum(e, dim, keepdims=True) if x.ndim else e


@rule("_log_softmax", context=True)
def _log_softmax(x: Any, dim: int, half_to_float: bool = False, *, ctx: Any) -> Any:
    x = _wide(x, ctx.dtype)
    if x.size == 0:
        return x
    shifted, e = _exps(x, dim)
    return shifted - jnp.log(jnp.sum(e, dim, keepdims=True) if x.ndim else e)


@rule("_safe_softmax", context=True)
def _safe_softmax(x: Any, dim: int, dtype: Any = None, *, ctx: Any) -> Any:
    # A row of -inf gives zeros, and its derivative is zero, not NaN.
    dead = jnp.max(x, dim, keepdims=True) == -jnp.inf
    return jnp.where(dead, 0, _softmax(jnp.where(dead, 0, x), dim, ctx=ctx))


def _wide(x: Any, dtype: Any) -> Any:
    # 16-bit inputs are summed in float32, as torch's kernels do.
    return x.astype(jnp.promote_types(dtype, jnp.float32))


@rule("_softmax_backward_data", cast=False)
def _softmax_backward(g: Any, y: Any, dim: int, input_dtype: Any) -> Any:
    gy = g * y
    return gy - y * (jnp.sum(gy, dim, keepdims=True) if y.ndim else gy)


@rule("_log_softmax_backward_data", cast=False)
def _log_softmax_backward(g: Any, y: Any, dim: int, input_dtype: Any) -> Any:
    return g - jnp.exp(y) * (jnp.sum(g, dim, keepdims=True) if y.ndim else g)
