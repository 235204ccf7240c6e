"""Sampling of images at computed positions, and antialiased resizing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx._core import LoweringError
from functx.compat._to_jax.rules.table import rule, rules
from functx.compat._to_jax.rules.views import straight_through

_NEAREST, _CUBIC = 1, 2
_ZEROS, _BORDER = 0, 1


def _unnormalize(g: Any, size: int, align: bool) -> Any:
    return (g + 1) / 2 * (size - 1) if align else ((g + 1) * size - 1) / 2


def _reflect(x: Any, low: float, high: float) -> Any:
    """Reflect positions into the range. Each reflection changes the sign of the derivative."""
    span = high - low
    if span == 0:
        return jnp.zeros_like(x)
    inside = jnp.where(x < low, low - x, x - low)
    folds = jnp.floor(lax.stop_gradient(inside) / span)
    extra = straight_through(jnp.fmod(inside, span), inside)
    return jnp.where(folds % 2 == 0, extra, span - extra) + low


def _within(x: Any, size: int, padding: int, align: bool) -> Any:
    """Move positions into the image, unless it is padded with zeros.

    Positions on the border and outside have no derivative.
    """
    if padding == _ZEROS:
        return x
    if padding != _BORDER:
        x = _reflect(x, 0.0, size - 1.0) if align else _reflect(x, -0.5, size - 0.5)
    return jnp.where(x <= 0, 0, jnp.where(x >= size - 1, size - 1, x))


def _taps(g: Any, size: int, mode: int, padding: int, align: bool) -> list[tuple[Any, Any]]:
    """The pixels that are read along one axis, and their weights. Some may lie outside."""
    x = _unnormalize(g, size, align)
    if mode == _CUBIC:
        first = jnp.floor(x)
        at = [_within(first + k, size, padding, align) for k in (-1, 0, 1, 2)]
        return [(jnp.round(p), w) for p, w in zip(at, _cubic(x - first))]
    x = _within(x, size, padding, align)
    if mode == _NEAREST:
        return [(jnp.round(x), jnp.ones_like(x))]
    first = jnp.floor(x)
    return [(first, first + 1 - x), (first + 1, x - first)]


def _cubic(t: Any) -> list[Any]:
    """The weights of four neighbours by Keys' cubic kernel, with torch's parameter."""
    a = -0.75
    near = lambda d: ((a + 2) * d - (a + 3)) * d * d + 1  # noqa: E731
    far = lambda d: ((a * d - 5 * a) * d + 8 * a) * d - 4 * a  # noqa: E731
    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


@rule("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(image: Any, grid: Any, mode: int, padding: int, align: bool) -> Any:
    sizes = image.shape[2:]
    n = len(sizes)
    # The grid's last axis is (x, y, z), the image's axes are (z, y, x).
    axes = [_taps(grid[..., n - 1 - i], m, mode, padding, align) for i, m in enumerate(sizes)]
    sample = jax.vmap(lambda plane, at: plane[(slice(None), *at)])
    total: Any = jnp.zeros(())
    for taps in itertools.product(*axes):
        inside = _all(((p >= 0) & (p < m) for (p, _), m in zip(taps, sizes)))
        at = tuple(jnp.where(inside, p, 0).astype(int) for p, _ in taps)
        weight = jnp.where(inside, _product([w for _, w in taps]), 0)
        # Pixels outside are zero, even if the pixel that is read in their place is NaN.
        pixels = jnp.where(inside[:, None], sample(image, at), 0)
        total = total + pixels * weight[:, None]
    return total


def _all(conditions: Any) -> Any:
    return jnp.stack([*conditions]).all(0)


def _product(factors: Sequence[Any]) -> Any:
    total = factors[0]
    for factor in factors[1:]:
        total = total * factor
    return total


def _antialiased(x: Any, size: Any, align: bool, *scales: Any, ctx: Any, method: str) -> Any:
    sizes = list(zip(x.shape[-2:], ctx.shape[-2:], (*scales, None, None)))
    # With a larger ratio, the centres of some of torch's windows lie outside the image.
    if align and any(n - 1 > 2 * (out - 1) for n, out, _ in sizes):
        raise LoweringError(
            "JAX has no counterpart of antialiased resizing to less than half the size with"
            " align_corners=True. Use align_corners=False"
        )
    # In torch's antialiased kernel, ``align`` does not move the corners. It changes only the scale.
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
