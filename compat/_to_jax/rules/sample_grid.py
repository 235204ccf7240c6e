"""Sampling of images at computed positions, and antialiased resizing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.ndimage import map_coordinates

from functx._core import LoweringError
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
    order = 0 if mode == _NEAREST else 1
    at = jnp.stack([p if order else jnp.round(p) for p in places], 1)
    sample = lambda image, p: map_coordinates(image, [*p], order, "constant")  # noqa: E731
    return jax.vmap(jax.vmap(sample, (0, None)))(x, at)


def _antialiased(x: Any, size: Any, align: bool, *scales: Any, ctx: Any, method: str) -> Any:
    sizes = list(zip(x.shape[-2:], ctx.shape[-2:], (*scales, None, None)))
    # Beyond that, centres of torch's windows lie outside the image.
    if align and any(n - 1 > 2 * (out - 1) for n, out, _ in sizes):
        raise LoweringError(
            "antialiased resizing to less than half the size with align_corners=True has no"
            " counterpart in JAX: use align_corners=False"
        )
    # The kernel of torch aligns nothing: only its scale is another one.
    factors = [
        (out - 1) / (n - 1) if align and n > 1 else given or out / n for n, out, given in sizes
    ]
    return jax.image.scale_and_translate(
        x,
        ctx.shape,
        (x.ndim - 2, x.ndim - 1),
        jnp.asarray(factors, x.dtype),
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
