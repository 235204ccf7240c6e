"""Indexing, gathering and scattering.

Indices have the same meaning as in torch: negative ones count from the end, and writes to one place
from several sources are summed where torch sums them.
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
from functx.compat._to_jax.rules.views import straight_through


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
    """Write values where a mask over some neighbouring axes is true, one value for each."""
    (mask, *others) = (i for i in indices if i is not None)
    if others:
        raise LoweringError(
            "an assignment uses a mask among other indices, so the number of elements that it"
            " writes depends on values. Use torch.where with a mask over the whole tensor"
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
    """Coordinates of all entries: ``index`` along ``dim``, and the entry's position elsewhere."""
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


def _multiply_at(x: Any, where: tuple[Any, ...], values: Any) -> Any:
    """Multiply places of ``x`` by values. Several values may go to one place.

    This uses only products (no division), so that derivatives of all orders are right where factors
    are zero. Factors of the same place are sorted next to each other and multiplied by a scan.
    """
    place = jnp.arange(x.size).reshape(x.shape)
    # Indices outside of x get the place x.size, which is dropped.
    onto = place.at[where].get(mode="fill", fill_value=x.size)
    places = jnp.concatenate([place.ravel(), onto.ravel()])
    factors = jnp.concatenate([x.ravel(), values.ravel()])
    order = jnp.argsort(places, stable=True)
    places, factors = places[order], factors[order]
    starts = jnp.concatenate([jnp.ones(1, bool), places[1:] != places[:-1]])

    def multiply(a: Any, b: Any) -> Any:
        return a[0] | b[0], jnp.where(b[0], 1, a[1]) * b[1]

    _, products = lax.associative_scan(multiply, (starts, factors))
    last = jnp.searchsorted(places, place.ravel(), side="right") - 1
    return products[last].reshape(x.shape)


def _extreme_at(x: Any, where: tuple[Any, ...], values: Any, how: str, counts: Any = True) -> Any:
    """The extreme of ``x`` and the values that go to its places. Equal ones share the derivative.

    ``counts`` says which entries of ``x`` take part. The others must never be the extreme.
    """
    found = lax.stop_gradient(getattr(x.at[where], how)(values, mode="drop"))
    same = lambda a, b: (a == b) | (jnp.isnan(a) & jnp.isnan(b))  # noqa: E731
    ours = same(x, found) & counts
    theirs = same(values, found.at[where].get(mode="fill", fill_value=0))
    number = ours.astype(x.dtype).at[where].add(theirs.astype(x.dtype), mode="drop")
    total = jnp.where(ours, x, 0).at[where].add(jnp.where(theirs, values, 0), mode="drop")
    return straight_through(found, total / jnp.maximum(number, 1))


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
    if reduce in ("amax", "amin") and jnp.issubdtype(x.dtype, jnp.inexact):
        counts = include_self or _scatter_by(jnp.ones(x.shape, bool), dim, index, False, "set")
        start, index, counts = jnp.atleast_1d(start, index, counts)
        values = jnp.atleast_1d(src)[tuple(slice(0, n) for n in index.shape)]
        where = _coordinates(index, dim % start.ndim)
        return _extreme_at(start, where, values, _REDUCERS[reduce], counts).reshape(x.shape)
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
    elif how in ("amax", "amin") and jnp.issubdtype(data.dtype, jnp.inexact):
        out = _extreme_at(base, (segment,), data, _REDUCERS[how], counts=False)
    else:
        out = getattr(base.at[segment], _REDUCERS[how])(data, mode="drop")
    if reduce == "mean":
        count = lengths.reshape(-1, *(1,) * (data.ndim - 1))
        out = jnp.where(
            count == 0, jnp.nan if initial is None else out, out / jnp.maximum(count, 1)
        )
    return out
