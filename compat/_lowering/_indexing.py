"""Indexing, gathering and scattering.

Indices are taken as torch takes them: negative ones count from the end, and a write to one place
from several sources adds up where torch says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._lowering._table import rule


def _indices(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


@rule("index.Tensor", "_unsafe_index.Tensor")
def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x[_indices(indices)]


@rule("_unsafe_masked_index")
def _masked_index(x: Any, mask: Any, indices: Sequence[Any], fill: Any) -> Any:
    safe = [None if i is None else jnp.clip(i, 0, x.shape[d] - 1) for d, i in enumerate(indices)]
    values = x[_indices(safe)]
    return jnp.where(mask, values, jnp.asarray(fill, values.dtype))


@rule("_unsafe_masked_index_put_accumulate")
def _masked_index_put(x: Any, mask: Any, indices: Sequence[Any], values: Any) -> Any:
    safe = [None if i is None else jnp.clip(i, 0, x.shape[d] - 1) for d, i in enumerate(indices)]
    values = jnp.where(mask, values, jnp.zeros_like(values))
    return x.at[_indices(safe)].add(values)


@rule("index_put", "_unsafe_index_put")
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    masks = [i for i in indices if i is not None and i.dtype == jnp.bool_]
    values = jnp.asarray(values, x.dtype)
    if masks:
        return _mask_put(x, indices, values, accumulate)
    at = x.at[_indices(indices)]
    return at.add(values) if accumulate else at.set(values)


def _mask_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    """Write where a mask over the leading axes is true; there are as many values as that."""
    if len(indices) != 1:
        at = x.at[_indices(indices)]  # JAX says what it can't do with a mask among indices
        return at.add(values) if accumulate else at.set(values)
    (mask,) = indices
    tail = x.shape[mask.ndim :]
    if values.ndim == len(tail) + 1 and values.shape[0] != 1:
        position = jnp.maximum(jnp.cumsum(mask.ravel()) - 1, 0).reshape(mask.shape)
        values = values[jnp.minimum(position, values.shape[0] - 1)]
    elif values.ndim == len(tail) + 1:
        values = values[0]
    mask = mask.reshape(mask.shape + (1,) * len(tail))
    return jnp.where(mask, x + values if accumulate else values, x)


def _at_least_1d(x: Any, *others: Any) -> tuple[Any, ...]:
    return tuple(jnp.atleast_1d(o) for o in (x, *others))


@rule("gather")
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    shape = index.shape
    if index.size == 0:
        return jnp.zeros(shape, x.dtype)
    x, index = _at_least_1d(x, index)
    return x[_places(index, dim % x.ndim)].reshape(shape)


def _places(index: Any, dim: int) -> tuple[Any, ...]:
    """Full coordinates of ``index`` along ``dim``, each entry at its own position elsewhere."""
    return tuple(
        index if d == dim else lax.broadcasted_iota(index.dtype, index.shape, d)
        for d in range(index.ndim)
    )


def _scatter_values(index: Any, src: Any) -> Any:
    src = jnp.asarray(src)
    if src.ndim == 0:
        return src
    return src[tuple(slice(0, n) for n in index.shape)]


@rule("scatter.src", "scatter.value")
def _scatter(x: Any, dim: int, index: Any, src: Any) -> Any:
    return _scatter_reduce_with(x, dim, index, src, "set")


@rule("scatter_add")
def _scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    return _scatter_reduce_with(x, dim, index, src, "add")


def _scatter_reduce_with(x: Any, dim: int, index: Any, src: Any, how: str) -> Any:
    shape = x.shape
    if jnp.ndim(src):
        x, index, src = _at_least_1d(x, index, src)
    else:
        x, index = _at_least_1d(x, index)
        src = jnp.asarray(src).reshape((1,) * x.ndim) if jnp.ndim(src) else src
    values = jnp.asarray(_scatter_values(index, src), x.dtype)
    return _write(x, _places(index, dim % x.ndim), values, how).reshape(shape)


def _write(x: Any, where: tuple[Any, ...], values: Any, how: str) -> Any:
    if how == "multiply" and jnp.issubdtype(x.dtype, jnp.inexact):
        return _multiply_at(x, where, jnp.broadcast_to(values, x[where].shape))
    return getattr(x.at[where], how)(values)


@jax.custom_jvp
def _multiply_at(x: Any, where: tuple[Any, ...], values: Any) -> Any:
    """Multiply values onto places of x, several may share one; lax has no derivative for it."""
    return x.at[where].multiply(values)


@_multiply_at.defjvp
def _multiply_at_jvp(primals: Any, tangents: Any) -> Any:
    x, where, values = primals
    dx, _, dv = tangents
    # Each factor's tangent times the product of the others: right also where one factor is zero.
    x0, v0 = x == 0, values == 0
    safe_x, safe_v = jnp.where(x0, 1, x), jnp.where(v0, 1, values)
    others = _multiply_at(safe_x, where, safe_v)
    zeros = x0.astype(jnp.int32).at[where].add(v0.astype(jnp.int32))
    relative = jnp.where(x0, 0, dx / safe_x).at[where].add(jnp.where(v0, 0, dv / safe_v))
    alone = jnp.where(x0, dx, 0).at[where].add(jnp.where(v0, dv, 0))
    tangent = others * jnp.where(zeros == 0, relative, jnp.where(zeros == 1, alone, 0))
    return _multiply_at(x, where, values), tangent


@rule("scatter.reduce", "scatter.value_reduce")
def _scatter_old_reduce(x: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    return _scatter_reduce_with(x, dim, index, src, "add" if reduce == "add" else "multiply")


_REDUCERS = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min", "mean": "add"}
_NEUTRAL = {"sum": 0, "prod": 1, "mean": 0}


def _neutral(reduce: str, dtype: Any) -> Any:
    if reduce in _NEUTRAL:
        return _NEUTRAL[reduce]
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf if reduce == "amax" else jnp.inf
    info = jnp.iinfo(dtype)
    return info.min if reduce == "amax" else info.max


@rule("scatter_reduce.two")
def _scatter_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    start = x
    if not include_self:
        start = _scatter_reduce_with(x, dim, index, _neutral(reduce, x.dtype), "set")
    out = _scatter_reduce_with(start, dim, index, src, _REDUCERS[reduce])
    if reduce != "mean":
        return out
    ones = jnp.ones_like(x, dtype=x.dtype)
    base = ones if include_self else _scatter_reduce_with(ones, dim, index, 0, "set")
    count = _scatter_reduce_with(base, dim, index, jnp.ones_like(src, dtype=x.dtype), "add")
    return _mean_of(out, count)


def _mean_of(total: Any, count: Any) -> Any:
    if jnp.issubdtype(total.dtype, jnp.integer):
        return jnp.floor_divide(total, jnp.maximum(count, 1))
    return total / count


@rule("index_select")
def _index_select(x: Any, dim: int, index: Any) -> Any:
    if x.ndim == 0:
        return x
    return jnp.take(x, jnp.atleast_1d(index), dim)


def _along(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    return (slice(None),) * (dim % x.ndim) + (jnp.atleast_1d(index),)


@rule("index_add", context=True)
def _index_add(x: Any, dim: int, index: Any, src: Any, *, alpha: Any = 1, ctx: Any) -> Any:
    if x.ndim == 0:
        return x + alpha * jnp.reshape(src, ())
    src = jnp.reshape(src, src.shape or (1,))
    return x.at[_along(x, dim, index)].add((src * alpha).astype(x.dtype))


@rule("index_copy")
def _index_copy(x: Any, dim: int, index: Any, src: Any) -> Any:
    if x.ndim == 0:
        return jnp.reshape(src, ())
    return x.at[_along(x, dim, index)].set(jnp.reshape(src, src.shape or (1,)))


@rule("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    value = jnp.asarray(value, x.dtype)
    if x.ndim == 0:
        return value
    return x.at[_along(x, dim, index)].set(value)


@rule("index_reduce")
def _index_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    shape = x.shape
    x, index, src = _at_least_1d(x, index, src)
    dim = dim % x.ndim
    spread = index.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    where = _places(jnp.broadcast_to(spread, src.shape), dim)
    start = x if include_self else x.at[where].set(_neutral(reduce, x.dtype))
    out = _write(start, where, src, _REDUCERS[reduce])
    if reduce == "mean":
        ones = jnp.ones_like(x)
        count = (ones if include_self else ones.at[where].set(0)).at[where].add(1)
        out = _mean_of(out, count)
    return out.reshape(shape)


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@rule("masked_scatter")
def _masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    x, mask = jnp.broadcast_arrays(x, mask)
    position = jnp.maximum(jnp.cumsum(mask.ravel()) - 1, 0).reshape(x.shape)
    flat = jnp.ravel(source)
    if flat.size == 0:
        return x
    return jnp.where(mask, flat[jnp.minimum(position, flat.size - 1)], x)


@rule("take")
def _take(x: Any, index: Any) -> Any:
    return jnp.ravel(x)[index]


@rule("put")
def _put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    at = jnp.ravel(x).at[index.ravel()]
    flat = source.ravel()
    return (at.add(flat) if accumulate else at.set(flat)).reshape(x.shape)


@rule("bincount", context=True)
def _bincount(x: Any, weights: Any = None, minlength: int = 0, *, ctx: Any) -> Any:
    return jnp.bincount(x, weights, minlength, length=ctx.shape[0])


@rule("segment_reduce")
def _segment_reduce(
    data: Any, reduce: str, *, lengths: Any = None, indices: Any = None, offsets: Any = None,
    axis: int = 0, unsafe: bool = False, initial: Any = None,
) -> Any:  # fmt: skip
    if lengths is None:
        lengths = jnp.diff(offsets, axis=axis)
    moved = jnp.moveaxis(data, axis, 0) if axis else data
    run = lambda d, n: _segments(d, n, reduce, initial)  # noqa: E731
    if axis == 0:
        return run(moved, lengths)
    for _ in range(axis):
        run = jax.vmap(run)
    return run(data, lengths)


def _segments(data: Any, lengths: Any, reduce: str, initial: Any) -> Any:
    segment = jnp.searchsorted(jnp.cumsum(lengths), jnp.arange(data.shape[0]), side="right")
    how = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    start = _neutral(how, data.dtype) if initial is None else initial
    shape = (lengths.shape[0], *data.shape[1:])
    base = jnp.full(shape, start, data.dtype)
    if how == "prod":
        out = _multiply_at(base, (segment,), data)
    else:
        out = getattr(base.at[segment], _REDUCERS[how])(data, mode="drop")
    if reduce == "mean":
        count = lengths.reshape(-1, *(1,) * (data.ndim - 1))
        out = jnp.where(
            count == 0, jnp.nan if initial is None else out, out / jnp.maximum(count, 1)
        )
    return out


@rule("nonzero_static")
def _nonzero_static(x: Any, *, size: int, fill_value: int = -1) -> Any:
    return jnp.argwhere(x, size=size, fill_value=fill_value)
