"""Sampling of images at computed positions, and antialiased resizing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx._errors import LoweringError
from functx.compat._to_jax.rules.table import rule, rules

_NEAREST = 1
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


def _antialiased(x: Any, size: Any, align: bool, *scales: Any, ctx: Any, method: str) -> Any:
    if align:
        raise LoweringError(
            "antialiased resizing with align_corners=True has no counterpart in JAX: use"
            " align_corners=False"
        )
    sizes = zip(x.shape[-2:], ctx.shape[-2:], (*scales, None, None))
    return jax.image.scale_and_translate(
        x,
        ctx.shape,
        (x.ndim - 2, x.ndim - 1),
        jnp.asarray([given or out / n for n, out, given in sizes], x.dtype),
        jnp.zeros(2, x.dtype),
        method,
        precision=lax.Precision.HIGHEST,
    )


rules(
    {
        "_upsample_bicubic2d_aa": partial(_antialiased, method="cubic"),
        "_upsample_bilinear2d_aa": partial(_antialiased, method="linear"),
    }
)
