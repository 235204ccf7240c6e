"""Sliding windows: convolutions, and pools, whose maxima have torch's indices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from functx.compat._to_jax.rules.table import rule, rules
from functx.compat._to_jax.rules.views import straight_through

Ints = Sequence[int]


def _tuple(x: Ints, n: int) -> tuple[int, ...]:
    return tuple(x) * n if len(x) == 1 else tuple(x)


@rule("convolution", "_convolution")
def _convolution(
    x: Any, weight: Any, bias: Any, stride: Ints, padding: Ints,
    dilation: Ints, transposed: bool, output_padding: Ints, groups: int, *_: Any,
) -> Any:  # fmt: skip
    n = weight.ndim - 2
    if x.ndim == n + 1:
        settings = (stride, padding, dilation, transposed, output_padding, groups)
        return _convolution(x[None], weight, bias, *settings)[0]
    stride, padding, dilation = _tuple(stride, n), _tuple(padding, n), _tuple(dilation, n)
    edges = [(p, p) for p in padding]
    between = (1,) * n
    if transposed:
        # The adjoint of a convolution is a convolution of the dilated input. Its kernel is flipped
        # in space, with input and output channels swapped within each group.
        c_in, c_out, *kernel = weight.shape
        weight = jnp.flip(weight, tuple(range(2, n + 2)))
        weight = weight.reshape(groups, c_in // groups, c_out, *kernel)
        weight = jnp.swapaxes(weight, 1, 2).reshape(groups * c_out, c_in // groups, *kernel)
        reach = [d * (k - 1) - p for k, p, d in zip(kernel, padding, dilation)]
        edges = [(r, r + o) for r, o in zip(reach, _tuple(output_padding, n))]
        stride, between = between, stride
    out = lax.conv_general_dilated(
        x,
        weight,
        stride,
        edges,
        lhs_dilation=between,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=lax.Precision.HIGHEST,
    )
    return out if bias is None else out + bias.reshape(-1, *(1,) * n)


@rule("convolution_backward")
def _convolution_backward(g: Any, x: Any, weight: Any, bias_sizes: Any, *rest: Any) -> Any:
    *settings, output_mask = rest
    _, pull = jax.vjp(lambda x, w: _convolution(x, w, None, *settings), x, weight)
    gradients = (*pull(g), jnp.sum(g, (0, *range(2, g.ndim))))
    return tuple(d if wanted else None for d, wanted in zip(gradients, output_mask))


def _largest(x: Any, positions: Sequence[Any]) -> tuple[Any, Any]:
    """The maxima of windows, and their indices in the flat image.

    Args:
        x: the images, ``(..., *spatial)``.
        positions: for each spatial axis the positions of every window, ``(out, kernel)``, or
            ``(images, out, kernel)`` if images have different windows. Some may lie outside.
    """
    n = len(positions)
    spatial = x.shape[-n:]
    flat: Any = np.zeros((1,) * (2 * n + 1), int)
    valid: Any = np.ones((1,) * (2 * n + 1), bool)
    for axis, (p, size) in enumerate(zip(positions, spatial)):
        p = p if p.ndim == 3 else p[None]
        shape = [len(p)] + [1] * (2 * n)
        shape[1 + axis], shape[1 + n + axis] = p.shape[1:]
        p = p.reshape(shape)
        valid = valid & (p >= 0) & (p < size)
        flat = flat * size + p.clip(0, size - 1)
    outs = valid.shape[1 : n + 1]
    flat, valid = (a.reshape(len(a), int(np.prod(outs)), -1) for a in (flat, valid))
    lowest = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    planes = x.reshape(int(np.prod(x.shape[:-n])), -1)
    image = jnp.arange(len(planes))[:, None, None]
    values = jnp.where(valid, planes[image, flat], jnp.asarray(lowest, x.dtype))
    # The last axis is one window in row-major order. As torch does, take the first maximum.
    choice = jnp.argmax(lax.stop_gradient(values), -1, keepdims=True)
    flat = jnp.broadcast_to(flat, values.shape)
    best, index = (jnp.take_along_axis(a, choice, -1) for a in (values, flat))
    result = (*x.shape[:-n], *outs)
    return best.reshape(result), index.reshape(result)


def _max_pool(
    x: Any, kernel: Ints, stride: Ints = (), padding: Ints = (0,), dilation: Ints = (1,),
    ceil_mode: bool = False, *, ctx: Any, n: int,
) -> tuple[Any, Any]:  # fmt: skip
    kernel = _tuple(kernel, n)
    stride = _tuple(stride, n) if len(stride) else kernel
    padding, dilation = _tuple(padding, n), _tuple(dilation, n)
    # Clip the kernel, so that no window is larger than its image.
    kernel = [
        min(k, -(-(m + p) // d)) for k, m, p, d in zip(kernel, x.shape[-n:], padding, dilation)
    ]
    settings = zip(ctx.shape[-n:], kernel, stride, padding, dilation)
    return _largest(
        x, [np.arange(o)[:, None] * s - p + np.arange(k) * d for o, k, s, p, d in settings]
    )


def _adaptive(size: int, out: int) -> tuple[Any, Any]:
    """Start and end of every window."""
    i = np.arange(out)
    return i * size // out, -((-(i + 1) * size) // out)


@rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max(x: Any, out: Ints) -> tuple[Any, Any]:
    positions = []
    for size, o in zip(x.shape[-len(out) :], out):
        start, end = _adaptive(size, o)
        p = start[:, None] + np.arange((end - start).max())
        positions.append(np.where(p < end[:, None], p, -1))
    return _largest(x, positions)


def _fractional_starts(sample: Any, size: int, kernel: int, out: int) -> Any:
    """The starts of the windows of a plane: steps of a fractional size from a random offset."""
    last = jnp.full((*sample.shape, 1), size - kernel, jnp.int32)
    if out == 1:
        return last
    # As torch does, compute in the dtype of the samples, since the result depends on rounding.
    step = jnp.asarray((size - kernel) / (out - 1), sample.dtype)
    i = jnp.arange(out - 1, dtype=sample.dtype)
    starts = ((i + sample[..., None]) * step).astype(jnp.int32)
    return jnp.concatenate([starts - (sample * step).astype(jnp.int32)[..., None], last], -1)


@rule("fractional_max_pool2d", "fractional_max_pool3d")
def _fractional(x: Any, kernel: Ints, out: Ints, samples: Any) -> tuple[Any, Any]:
    n = len(kernel)
    # In two dimensions the first sample is for the width, in three dimensions for the depth.
    by_axis = jnp.moveaxis(samples.reshape(-1, n)[:, :: -1 if n == 2 else 1], 1, 0)
    settings = zip(by_axis, x.shape[-n:], kernel, out)
    return _largest(
        x, [_fractional_starts(s, m, k, o)[..., None] + jnp.arange(k) for s, m, k, o in settings]
    )


def _put(x: Any, indices: Any, size: Ints, n: int) -> Any:
    """Images of a size, with elements written at flat indices.

    If several elements have the same index, one of them is written, but all of them get the
    derivative, as in torch.
    """
    lead = x.shape[:-n]
    rows = int(np.prod(lead))
    flat = jnp.zeros((rows, int(np.prod(size))), x.dtype)
    at = flat.at[jnp.arange(rows)[:, None], indices.reshape(rows, -1)]
    values = x.reshape(rows, -1)
    out = straight_through(lax.stop_gradient(at.set(values)), at.add(values))
    return out.reshape(*lead, *size)


def _max_backward(g: Any, x: Any, *rest: Any, n: int) -> Any:
    """Add each cotangent at the position of its maximum."""
    rows, indices = int(np.prod(x.shape[:-n])), rest[-1]
    at = jnp.zeros((rows, int(np.prod(x.shape[-n:]))), g.dtype).at[
        jnp.arange(rows)[:, None], indices.reshape(rows, -1)
    ]
    return at.add(g.reshape(rows, -1)).reshape(x.shape)


def _avg_pool(
    x: Any, kernel: Ints, stride: Ints = (), padding: Ints = (0,), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None, *, out: Ints,
) -> Any:  # fmt: skip
    n = len(out)
    kernel, padding = _tuple(kernel, n), _tuple(padding, n)
    stride = _tuple(stride, n) if len(stride) else kernel
    settings = list(zip(out, stride, kernel, x.shape[-n:], padding))
    window = tuple(min(k, size + p) for _, _, k, size, p in settings)  # not larger than the image
    edges = [(p, max((o - 1) * s + k - z - p, 0)) for k, (o, s, _, z, p) in zip(window, settings)]
    lead = x.ndim - n
    # The zero is a numpy array. A traced zero would hide from JAX that this is a sum, and JAX can
    # differentiate only a sum.
    zero = np.zeros((), x.dtype)
    total = lax.reduce_window(
        x, zero, lax.add, (1,) * lead + window, (1,) * lead + stride, [(0, 0)] * lead + edges
    )
    total = total[(..., *(slice(0, o) for o in out))]
    if divisor_override is not None:
        return total / divisor_override
    count: Any = np.ones(())
    for o, s, k, size, p in settings:
        start = np.arange(o) * s - p
        end = np.minimum(start + k, size + p)
        inside = np.minimum(end, size) - np.maximum(start, 0)
        count = count[..., None] * (end - start if count_include_pad else inside)
    return total / jnp.asarray(count, x.dtype)


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_avg(x: Any, out: Ints) -> Any:
    n = len(out)
    for axis, o in zip(range(x.ndim - n, x.ndim), out):
        start, end = _adaptive(x.shape[axis], o)
        position = np.arange(x.shape[axis])
        inside = (position >= start[:, None]) & (position < end[:, None])
        weights = jnp.asarray(inside / (end - start)[:, None], x.dtype)
        x = jnp.moveaxis(x, axis, -1)
        x = jnp.moveaxis(jnp.matmul(x, weights.T, precision=lax.Precision.HIGHEST), -1, axis)
    return x


def _backward(g: Any, x: Any, *settings: Any, pool: Any, n: int) -> Any:
    return jax.vjp(lambda y: pool(y, *settings, out=g.shape[-n:]), x)[1](g)[0]


def _register(n: int) -> None:
    """Register the pools of ``n`` dimensions."""
    backward = f"adaptive_max_pool{n}d_backward fractional_max_pool{n}d_backward"
    rules(
        {
            f"_adaptive_avg_pool{n}d_backward": partial(_backward, pool=_adaptive_avg, n=n),
            f"avg_pool{n}d": lambda *args, ctx: _avg_pool(*args, out=ctx.shape[-n:]),
            f"avg_pool{n}d_backward": partial(_backward, pool=_avg_pool, n=n),
            f"max_pool{n}d_with_indices": partial(_max_pool, n=n),
            f"max_pool{n}d_with_indices_backward {backward}": partial(_max_backward, n=n),
            f"max_unpool{n}d": lambda x, indices, size, *_: _put(x, indices, size, n),
        }
    )


_register(2)
_register(3)
