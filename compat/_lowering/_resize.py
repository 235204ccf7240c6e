"""Resizing, and sampling of images at computed positions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from functx.compat._lowering._table import rule

_BILINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER = 0, 1


def _unnormalize(g: Any, size: int, align: bool) -> Any:
    return (g + 1) / 2 * (size - 1) if align else ((g + 1) * size - 1) / 2


def _reflect(x: Any, low: float, high: float) -> Any:
    span = high - low
    if span == 0:
        return jnp.zeros_like(x)
    folded = jnp.mod(jnp.abs(x - low), 2 * span)
    return jnp.where(folded > span, 2 * span - folded, folded) + low


def _place(g: Any, size: int, padding: int, align: bool) -> Any:
    x = _unnormalize(g, size, align)
    if padding == _ZEROS:
        return x
    if padding != _BORDER:
        x = _reflect(x, 0.0, size - 1.0) if align else _reflect(x, -0.5, size - 0.5)
    return jnp.clip(x, 0, size - 1)


@rule("grid_sampler_3d")
def _grid_sampler_3d(x: Any, grid: Any, mode: int, padding: int, align: bool) -> Any:
    sizes = x.shape[2:]
    # The grid's last axis is (x, y, z), the image's axes are (z, y, x).
    places = [_place(grid[..., 2 - i], sizes[i], padding, align) for i in range(3)]
    if mode == _NEAREST:
        return _take(x, [jnp.round(p) for p in places], jnp.ones_like(places[0]))
    low = [jnp.floor(p) for p in places]
    out = jnp.zeros((), x.dtype)
    for corner in range(8):
        bits = [(corner >> i) & 1 for i in range(3)]
        weight = jnp.ones_like(places[0])
        for p, base, bit in zip(places, low, bits):
            weight = weight * (p - base if bit else base + 1 - p)
        out = out + _take(x, [base + bit for base, bit in zip(low, bits)], weight)
    return out


def _take(x: Any, index: list[Any], weight: Any) -> Any:
    """Elements (N, C, ...) at integer positions (N, ...) an axis, weighted; zero outside."""
    inside = jnp.ones(weight.shape, bool)
    safe = []
    for i, size in zip(index, x.shape[2:]):
        inside = inside & (i >= 0) & (i < size)
        safe.append(jnp.clip(i, 0, size - 1).astype(jnp.int32))
    batch = jnp.arange(x.shape[0]).reshape(-1, *(1,) * (weight.ndim - 1))
    values = x[(batch, slice(None), *safe)]
    return jnp.moveaxis(values * (weight * inside)[..., None], -1, 1)


def _linear_filter(x: Any) -> Any:
    return np.maximum(1 - np.abs(x), 0)


def _cubic_filter(x: Any, a: float = -0.5) -> Any:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _weights(n: int, out: int, scale: float, kernel: Any, reach: int) -> Any:
    """The (out, n) matrix of an antialiased resize: the kernel is widened when shrinking."""
    wide = max(scale, 1.0)
    support = reach * wide
    matrix = np.zeros((out, n))
    for i in range(out):
        centre = scale * (i + 0.5)
        low = max(int(centre - support + 0.5), 0)
        high = min(int(centre + support + 0.5), n)
        w = kernel((np.arange(low, high) - centre + 0.5) / wide)
        matrix[i, low:high] = w / w.sum()
    return matrix


def _antialiased(x: Any, shape: Any, align: bool, scales: Any, kernel: Any, reach: int) -> Any:
    for axis, given in zip((-2, -1), (*scales, None, None)):
        n, out = x.shape[axis], shape[axis]
        if align:
            scale = (n - 1) / (out - 1) if out > 1 else 0.0
        else:
            scale = 1 / given if given else n / out
        matrix = jnp.asarray(_weights(n, out, scale, kernel, reach), x.dtype)
        moved = jnp.moveaxis(x, axis, -1)
        product = jnp.matmul(moved, matrix.T, precision=lax.Precision.HIGHEST)
        x = jnp.moveaxis(product, -1, axis)
    return x


@rule("_upsample_bilinear2d_aa", context=True)
def _bilinear_aa(x: Any, size: Any, align: bool, *scales: Any, ctx: Any) -> Any:
    return _antialiased(x, ctx.shape, align, scales, _linear_filter, 1)


@rule("_upsample_bicubic2d_aa", context=True)
def _bicubic_aa(x: Any, size: Any, align: bool, *scales: Any, ctx: Any) -> Any:
    return _antialiased(x, ctx.shape, align, scales, _cubic_filter, 2)
