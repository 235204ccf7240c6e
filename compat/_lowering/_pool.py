"""Pooling: maxima with torch's indices, averages, adaptive windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from functx.compat._lowering._table import rule
from functx.compat._lowering._views import straight_through

Ints = Sequence[int]


def _tuple(x: Ints, n: int) -> tuple[int, ...]:
    return tuple(x) * n if len(x) == 1 else tuple(x)


def _windows(
    shape: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, out: Ints
) -> list[Any]:
    """For each spatial axis the input positions (out, kernel) of every window, may lie outside."""
    return [
        np.arange(o)[:, None] * s - p + np.arange(k)[None, :] * d
        for o, k, s, p, d in zip(out, kernel, stride, padding, dilation)
    ]


def _gather_windows(x: Any, positions: list[Any], fill: float) -> tuple[Any, Any]:
    """Elements (..., *out, prod(kernel)) of the windows and their flat positions in the image."""
    n = len(positions)
    spatial = x.shape[-n:]
    flat: Any = np.zeros((1,) * (2 * n), int)
    valid: Any = np.ones((1,) * (2 * n), bool)
    for axis, (p, size) in enumerate(zip(positions, spatial)):
        shape = [1] * (2 * n)
        shape[axis], shape[n + axis] = p.shape
        p = p.reshape(shape)
        valid = valid & (p >= 0) & (p < size)
        flat = flat * size + np.clip(p, 0, size - 1)
    outs = tuple(p.shape[0] for p in positions)
    flat = np.broadcast_to(flat, valid.shape).reshape(*outs, -1)
    valid = valid.reshape(*outs, -1)
    values = x.reshape(*x.shape[:-n], -1)[..., flat]
    return jnp.where(valid, values, jnp.asarray(fill, x.dtype)), flat


def _max_pool(
    x: Any,
    kernel: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    dilation: Ints = (1,),
    ceil_mode: bool = False,
    *,
    ctx: Any,
    n: int,
) -> tuple[Any, Any]:
    kernel = _tuple(kernel, n)
    stride = _tuple(stride, n) if len(stride) else kernel
    out = ctx.shape[-n:]
    positions = _windows(x.shape, kernel, stride, _tuple(padding, n), _tuple(dilation, n), out)
    lowest = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    values, flat = _gather_windows(x, positions, lowest)
    # The last axis is one window in row-major order: the first maximum is the one torch takes.
    choice = jnp.argmax(lax.stop_gradient(values), -1, keepdims=True)
    best = jnp.take_along_axis(values, choice, -1)[..., 0]
    index = jnp.take_along_axis(jnp.broadcast_to(flat, values.shape), choice, -1)[..., 0]
    return best, index


@rule("max_pool2d_with_indices", context=True)
def _max_pool2d(*args: Any, **kwargs: Any) -> Any:
    return _max_pool(*args, **kwargs, n=2)


@rule("max_pool3d_with_indices", context=True)
def _max_pool3d(*args: Any, **kwargs: Any) -> Any:
    return _max_pool(*args, **kwargs, n=3)


def _put_back(g: Any, x: Any, indices: Any, n: int) -> Any:
    """Add each cotangent to the flat image position its maximum came from."""
    lead = x.shape[:-n]
    size = int(np.prod(x.shape[-n:]))
    rows = int(np.prod(lead))
    flat = jnp.zeros((rows, size), g.dtype)
    where = indices.reshape(rows, -1)
    out = flat.at[jnp.arange(rows)[:, None], where].add(g.reshape(rows, -1))
    return out.reshape(x.shape)


@rule("max_pool2d_with_indices_backward")
def _max_pool2d_backward(g: Any, x: Any, *args: Any) -> Any:
    return _put_back(g, x, args[-1], 2)


@rule("max_pool3d_with_indices_backward")
def _max_pool3d_backward(g: Any, x: Any, *args: Any) -> Any:
    return _put_back(g, x, args[-1], 3)


@rule("adaptive_max_pool2d_backward")
def _adaptive_max_pool2d_backward(g: Any, x: Any, indices: Any) -> Any:
    return _put_back(g, x, indices, 2)


@rule("adaptive_max_pool3d_backward")
def _adaptive_max_pool3d_backward(g: Any, x: Any, indices: Any) -> Any:
    return _put_back(g, x, indices, 3)


def _avg_pool(
    x: Any,
    kernel: Ints,
    stride: Ints = (),
    padding: Ints = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: Ints,
    n: int,
) -> Any:
    kernel, padding = _tuple(kernel, n), _tuple(padding, n)
    stride = _tuple(stride, n) if len(stride) else kernel
    edges = [(p, max((o - 1) * s + k - size - p, 0))
             for o, s, k, size, p in zip(out, stride, kernel, x.shape[-n:], padding)]  # fmt: skip
    lead = x.ndim - n
    # A numpy zero, so that JAX sees a sum (which it can differentiate) also while tracing.
    zero = np.zeros((), x.dtype)
    total = lax.reduce_window(
        x, zero, lax.add, (1,) * lead + kernel, (1,) * lead + stride, [(0, 0)] * lead + edges
    )
    total = total[(..., *(slice(0, o) for o in out))]
    if divisor_override is not None:
        return total / divisor_override
    count: Any = np.ones((1,) * n)
    for axis, (o, s, k, size, p) in enumerate(zip(out, stride, kernel, x.shape[-n:], padding)):
        start = np.arange(o) * s - p
        end = np.minimum(start + k, size + p)
        inside = np.minimum(end, size) - np.maximum(start, 0)
        width = end - start if count_include_pad else inside
        count = count * width.reshape([-1 if a == axis else 1 for a in range(n)])
    return total / jnp.asarray(count, x.dtype)


@rule("avg_pool1d", context=True)
def _avg_pool1d(*args: Any, ctx: Any, **kwargs: Any) -> Any:
    return _avg_pool(*args, **kwargs, out=ctx.shape[-1:], n=1)


@rule("avg_pool2d", context=True)
def _avg_pool2d(*args: Any, ctx: Any, **kwargs: Any) -> Any:
    return _avg_pool(*args, **kwargs, out=ctx.shape[-2:], n=2)


@rule("avg_pool3d", context=True)
def _avg_pool3d(*args: Any, ctx: Any, **kwargs: Any) -> Any:
    return _avg_pool(*args, **kwargs, out=ctx.shape[-3:], n=3)


def _avg_backward(g: Any, x: Any, *settings: Any, n: int) -> Any:
    _, pull = jax.vjp(lambda y: _avg_pool(y, *settings, out=g.shape[-n:], n=n), x)
    return pull(g)[0]


@rule("avg_pool2d_backward")
def _avg_pool2d_backward(g: Any, x: Any, *settings: Any) -> Any:
    return _avg_backward(g, x, *settings, n=2)


@rule("avg_pool3d_backward")
def _avg_pool3d_backward(g: Any, x: Any, *settings: Any) -> Any:
    return _avg_backward(g, x, *settings, n=3)


def _adaptive(size: int, out: int) -> tuple[Any, Any]:
    i = np.arange(out)
    return i * size // out, -((-(i + 1) * size) // out)


def _adaptive_avg(x: Any, out: Ints) -> Any:
    n = len(out)
    for axis, o in zip(range(x.ndim - n, x.ndim), out):
        start, end = _adaptive(x.shape[axis], o)
        position = np.arange(x.shape[axis])
        inside = (position >= start[:, None]) & (position < end[:, None])
        weights = jnp.asarray(inside / (end - start)[:, None], x.dtype)
        moved = jnp.moveaxis(x, axis, -1)
        moved = jnp.matmul(moved, weights.T, precision=lax.Precision.HIGHEST)
        x = jnp.moveaxis(moved, -1, axis)
    return x


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")
def _adaptive_avg_pool(x: Any, out: Ints) -> Any:
    return _adaptive_avg(x, out)


@rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", context=True)
def _adaptive_avg_backward(g: Any, x: Any, *, ctx: Any) -> Any:
    n = 2 if "2d" in str(ctx.node.target) else 3
    _, pull = jax.vjp(lambda y: _adaptive_avg(y, g.shape[-n:]), x)
    return pull(g)[0]


def _adaptive_max(x: Any, out: Ints) -> tuple[Any, Any]:
    positions = []
    for size, o in zip(x.shape[-len(out) :], out):
        start, end = _adaptive(size, o)
        p = start[:, None] + np.arange((end - start).max())
        positions.append(np.where(p < end[:, None], p, -1))
    values, flat = _gather_windows(x, positions, -np.inf)
    choice = jnp.argmax(lax.stop_gradient(values), -1, keepdims=True)
    best = jnp.take_along_axis(values, choice, -1)[..., 0]
    index = jnp.take_along_axis(jnp.broadcast_to(flat, values.shape), choice, -1)[..., 0]
    return best, index


@rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(x: Any, out: Ints) -> Any:
    return _adaptive_max(x, out)


def _fractional_starts(sample: Any, size: int, kernel: int, out: int) -> Any:
    """Where each window of a plane starts: steps of a fractional size, from a random offset."""
    last = jnp.full((*sample.shape, 1), size - kernel, jnp.int32)
    if out == 1:
        return last
    # In the dtype of the samples, as torch does: rounding decides.
    step = jnp.asarray((size - kernel) / (out - 1), sample.dtype)
    i = jnp.arange(out - 1, dtype=sample.dtype)
    starts = ((i + sample[..., None]) * step).astype(jnp.int32)
    return jnp.concatenate([starts - (sample * step).astype(jnp.int32)[..., None], last], -1)


def _fractional_max_pool(x: Any, kernel: Ints, out: Ints, samples: Any) -> tuple[Any, Any]:
    n = len(kernel)
    spatial = x.shape[-n:]
    planes = x.reshape(-1, int(np.prod(spatial)))
    samples = samples.reshape(-1, n)
    flat: Any = jnp.zeros((1,) * (2 * n + 1), jnp.int32)
    for axis, (size, k, o) in enumerate(zip(spatial, kernel, out)):
        # In two dimensions the first sample is that of the width, in three that of the depth.
        sample = samples[:, 1 - axis if n == 2 else axis]
        place = _fractional_starts(sample, size, k, o)[..., None] + jnp.arange(k)
        shape = [len(planes), *[1] * (2 * n)]
        shape[1 + axis], shape[1 + n + axis] = o, k
        flat = flat * size + place.reshape(shape)
    flat = flat.reshape(len(planes), int(np.prod(out)), int(np.prod(kernel)))
    values = jnp.take_along_axis(planes[:, None], flat, -1)
    choice = jnp.argmax(lax.stop_gradient(values), -1, keepdims=True)
    results = (jnp.take_along_axis(a, choice, -1)[..., 0] for a in (values, flat))
    best, index = (a.reshape(*x.shape[:-n], *out) for a in results)
    return best, index


@rule("fractional_max_pool2d", "fractional_max_pool3d")
def _fractional(x: Any, kernel: Ints, out: Ints, samples: Any) -> tuple[Any, Any]:
    return _fractional_max_pool(x, kernel, out, samples)


@rule("fractional_max_pool2d_backward")
def _fractional2d_backward(g: Any, x: Any, kernel: Ints, out: Ints, indices: Any) -> Any:
    return _put_back(g, x, indices, 2)


@rule("fractional_max_pool3d_backward")
def _fractional3d_backward(g: Any, x: Any, kernel: Ints, out: Ints, indices: Any) -> Any:
    return _put_back(g, x, indices, 3)


@rule("max_unpool2d")
def _max_unpool2d(x: Any, indices: Any, size: Ints) -> Any:
    rows = int(np.prod(x.shape[:-2]))
    flat = jnp.zeros((rows, int(np.prod(size))), x.dtype)
    return _unpooled(x, indices, flat).reshape(*x.shape[:-2], *size)


def _unpooled(x: Any, indices: Any, flat: Any) -> Any:
    at = flat.at[jnp.arange(len(flat))[:, None], indices.reshape(len(flat), -1)]
    values = x.reshape(len(flat), -1)
    # Where several elements share a place one wins, but torch's derivative goes to all of them.
    return straight_through(lax.stop_gradient(at.set(values)), at.add(values))


@rule("max_unpool3d")
def _max_unpool3d(x: Any, indices: Any, size: Ints, stride: Ints, padding: Ints) -> Any:
    rows = int(np.prod(x.shape[:-3]))
    flat = jnp.zeros((rows, int(np.prod(size))), x.dtype)
    return _unpooled(x, indices, flat).reshape(*x.shape[:-3], *size)
