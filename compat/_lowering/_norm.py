"""Normalisation layers, forward and backward.

Backward operations read the statistics that the forward operation saved, as torch's do; in the
lowered graph those are functions of the input, so second derivatives flow through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from functx.compat._lowering._table import rule


def _wide(x: Any) -> Any:
    # Statistics of 16-bit inputs are taken in float32, as torch's kernels do.
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _normalized(x: Any, dims: tuple[int, ...], eps: float) -> tuple[Any, Any, Any]:
    x = _wide(x)
    mean = jnp.mean(x, dims, keepdims=True)
    centred = x - mean
    rstd = lax.rsqrt(jnp.mean(centred * centred, dims, keepdims=True) + eps)
    return centred * rstd, mean, rstd


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@rule("native_layer_norm")
def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    y, mean, rstd = _normalized(x, dims, eps)
    return _affine(y, weight, bias).astype(x.dtype), mean, rstd


@rule("native_layer_norm_backward")
def _layer_norm_backward(
    g: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any,
    output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    lead = tuple(range(x.ndim - len(shape)))
    xhat = (_wide(x) - mean) * rstd
    gy = _wide(g) if weight is None else _wide(g) * weight
    inner = gy - jnp.mean(gy, dims, keepdims=True) - xhat * jnp.mean(gy * xhat, dims, keepdims=True)
    dx = (inner * rstd).astype(x.dtype)
    dw = None if weight is None else jnp.sum(_wide(g) * xhat, lead).astype(weight.dtype)
    db = None if bias is None else jnp.sum(_wide(g), lead).astype(bias.dtype)
    return tuple(d if wanted else None for d, wanted in zip((dx, dw, db), output_mask))


@rule("native_group_norm")
def _group_norm(
    x: Any, weight: Any, bias: Any, n: int, channels: int, size: int, groups: int, eps: float
) -> Any:
    grouped = x.reshape(n, groups, -1)
    y, mean, rstd = _normalized(grouped, (2,), eps)
    tail = (1,) * (x.ndim - 2)
    weight = None if weight is None else weight.reshape(channels, *tail)
    bias = None if bias is None else bias.reshape(channels, *tail)
    out = _affine(y.reshape(x.shape), weight, bias).astype(x.dtype)
    return out, mean[..., 0], rstd[..., 0]


@rule("native_group_norm_backward")
def _group_norm_backward(
    g: Any, x: Any, mean: Any, rstd: Any, weight: Any, n: int, channels: int, size: int,
    groups: int, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    xs = _wide(x).reshape(n, groups, -1)
    xhat = (xs - mean[..., None]) * rstd[..., None]
    by_channel = _wide(g).reshape(n, channels, -1)
    gy = by_channel if weight is None else by_channel * weight[None, :, None]
    gy = gy.reshape(n, groups, -1)
    inner = gy - jnp.mean(gy, 2, keepdims=True) - xhat * jnp.mean(gy * xhat, 2, keepdims=True)
    dx = (inner * rstd[..., None]).reshape(x.shape).astype(x.dtype)
    dw = jnp.sum(by_channel * xhat.reshape(n, channels, -1), (0, 2)).astype(x.dtype)
    db = jnp.sum(by_channel, (0, 2)).astype(x.dtype)
    return tuple(d if wanted else None for d, wanted in zip((dx, dw, db), output_mask))


def _per_channel(p: Any, x: Any) -> Any:
    return None if p is None else p.reshape(-1, *(1,) * (x.ndim - 2))


def batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any, Any, Any]:
    """Batch norm over (N, C, ...).

    Returns:
        The output, the saved mean and inverse deviation, and the new running mean and variance.
    """
    dims = (0, *range(2, x.ndim))
    affine = (_per_channel(weight, x), _per_channel(bias, x))
    if not training:
        rstd = lax.rsqrt(_wide(var) + eps)
        y = (_wide(x) - _per_channel(mean, x)) * _per_channel(rstd, x)
        return _affine(y, *affine).astype(x.dtype), mean, rstd, mean, var
    y, m, rstd = _normalized(x, dims, eps)
    out = _affine(y, *affine).astype(x.dtype)
    m, rstd = m.reshape(-1), rstd.reshape(-1)
    if mean is not None:
        count = x.size // x.shape[1]
        unbiased = (1 / (rstd * rstd) - eps) * (count / max(count - 1, 1))
        mean = (1 - momentum) * mean + momentum * m
        var = (1 - momentum) * var + momentum * unbiased
    return out, m, rstd, mean, var


@rule("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    return batch_norm(x, weight, bias, mean, var, training, momentum, eps)


@rule("_native_batch_norm_legit_no_training")
def _batch_norm_inference(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    out = batch_norm(x, weight, bias, mean, var, False, momentum, eps)[0]
    return out, jnp.zeros((0,), x.dtype), jnp.zeros((0,), x.dtype)


@rule("_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    return batch_norm(x, weight, bias, None, None, True, momentum, eps)[:3]
