"""Indexing, gathering and scattering.

Indices are taken as torch takes them: negative ones count from the end, and a write to one place
from several sources adds up where torch says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx._core import LoweringError
from functx.compat._to_jax.rules.table import rule, rules


def _indices(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


@rule("index_put", "_unsafe_index_put")
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    values = jnp.asarray(values, x.dtype)
    if any(i is not None and i.dtype == jnp.bool_ for i in indices):
        return _mask_put(x, indices, values, accumulate)
    at = x.at[_indices(indices)]
    return at.add(values) if accumulate else at.set(values)


def _mask_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    """Write where a mask is true, over some neighbouring axes; there are as many values as that."""
    (mask, *others) = (i for i in indices if i is not None)
    if others:
        raise LoweringError(
            "an assignment has a mask among other indices, so how many elements it writes depends"
            " on values: use torch.where with a mask over the whole tensor"
        )
    before = next(i for i, index in enumerate(indices) if index is not None)
    ahead, behind = range(before), range(-before, 0)
    x = jnp.moveaxis(x, ahead, behind)
    tail = x.shape[mask.ndim :]
    axes = len(tail) + 1
    values = jnp.moveaxis(values.reshape(((1,) * axes + values.shape)[-axes:]), ahead, behind)
    if values.shape[0] > 1:
        position = jnp.maximum(jnp.cumsum(mask.ravel()) - 1, 0).reshape(mask.shape)
        values = values[jnp.minimum(position, values.shape[0] - 1)]
    elif values.shape[0] == 1:
        values = values[0]
    else:  # the mask is false everywhere
        values = x
    mask = mask.reshape(mask.shape + (1,) * len(tail))
    written = jnp.where(mask, x + values if accumulate else values, x)
    return jnp.moveaxis(written, behind, ahead)


@rule("gather")
def _gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    shape = index.shape
    x, index = jnp.atleast_1d(x, index)
    return x[_coordinates(index, dim % x.ndim)].reshape(shape)


def _coordinates(index: Any, dim: int) -> tuple[Any, ...]:
    """Full coordinates of ``index`` along ``dim``, each entry at its own position elsewhere."""
    return tuple(
        index if d == dim else lax.broadcasted_iota(index.dtype, index.shape, d)
        for d in range(index.ndim)
    )


def _scatter_by(x: Any, dim: int, index: Any, src: Any, reduce: str) -> Any:
    shape = x.shape
    x, index = jnp.atleast_1d(x, index)
    values = jnp.asarray(src, x.dtype)
    if jnp.ndim(src) or x.ndim == 1:
        values = jnp.atleast_1d(values)[tuple(slice(0, n) for n in index.shape)]
    return _write(x, _coordinates(index, dim % x.ndim), values, reduce).reshape(shape)


rules(
    {
        "bincount": lambda x, weights=None, minlength=0, *, ctx: jnp.bincount(
            x, weights, minlength, length=ctx.shape[0]
        ),
        "index.Tensor _unsafe_index.Tensor": lambda x, indices: x[_indices(indices)],
        "nonzero_static": partial(jnp.argwhere, fill_value=-1),
        "take": lambda x, index: jnp.ravel(x)[index],
        "masked_fill": lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x),
        "scatter.reduce scatter.value_reduce": _scatter_by,
        "scatter.src scatter.value": partial(_scatter_by, reduce="set"),
        "scatter_add": partial(_scatter_by, reduce="add"),
    }
)


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
    start = x if include_self else _scatter_by(x, dim, index, _neutral(reduce, x.dtype), "set")
    out = _scatter_by(start, dim, index, src, _REDUCERS[reduce])
    if reduce != "mean":
        return out
    one = jnp.ones_like(x)
    base = one if include_self else _scatter_by(one, dim, index, 0, "set")
    count = _scatter_by(base, dim, index, jnp.ones_like(src, x.dtype), "add")
    if jnp.issubdtype(out.dtype, jnp.integer):
        return jnp.floor_divide(out, jnp.maximum(count, 1))
    return out / count


@rule("index_reduce")
def _index_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    src = jnp.reshape(src, src.shape or (1,) * x.ndim)
    spread = jnp.reshape(index, [-1 if d == dim % x.ndim else 1 for d in range(x.ndim)])
    index = jnp.broadcast_to(spread, src.shape)
    return _scatter_reduce(x, dim, index, src, reduce, include_self=include_self)


@rule("masked_scatter")
def _masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    x, mask = jnp.broadcast_arrays(x, mask)
    position = jnp.maximum(jnp.cumsum(mask.ravel()) - 1, 0).reshape(x.shape)
    flat = jnp.ravel(source)
    if flat.size == 0:
        return x
    return jnp.where(mask, flat[jnp.minimum(position, flat.size - 1)], x)


@rule("put")
def _put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    at = jnp.ravel(x).at[index.ravel()]
    flat = source.ravel()
    return (at.add(flat) if accumulate else at.set(flat)).reshape(x.shape)


@rule("segment_reduce")
def _segment_reduce(
    data: Any, reduce: str, *, lengths: Any = None, indices: Any = None, offsets: Any = None,
    axis: int = 0, unsafe: bool = False, initial: Any = None,
) -> Any:  # fmt: skip
    if lengths is None:
        lengths = jnp.diff(offsets, axis=axis)
    run = lambda d, n: _segments(d, n, reduce, initial)  # noqa: E731
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
