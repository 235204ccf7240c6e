"""Select and order elements. Results are values and indices; selected ones get derivatives."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._to_jax.rules.reductions import along
from functx.compat._to_jax.rules.table import rule, rules


def _pick(x: Any, index: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """Value and index of one element along ``dim``, which alone gets the derivative."""
    index = jnp.expand_dims(index, dim)
    values = jnp.take_along_axis(x, index, dim)
    return (values, index) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(index, dim))


def _chosen(x: Any, choose: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    return _pick(x, choose(lax.stop_gradient(x), axis=dim), dim % x.ndim, keepdim)


# jnp.argmax takes bool as integers and the first NaN as the largest, as torch does.
rules(
    {
        "max.dim": lambda x, dim, keepdim=False: _chosen(x, jnp.argmax, dim, keepdim),
        "min.dim": lambda x, dim, keepdim=False: _chosen(x, jnp.argmin, dim, keepdim),
    }
)


def _running(x: Any, dim: int, better: Any) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    index = lax.broadcasted_iota(int, x.shape, dim % x.ndim)

    def last_best(a: Any, b: Any) -> Any:
        take = better(b[0], a[0]) | jnp.isnan(b[0])
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    values = lax.stop_gradient(x)
    _, where = lax.associative_scan(last_best, (values, index), axis=dim % x.ndim)
    return jnp.take_along_axis(x, where, dim % x.ndim), where


rules(
    {
        "cummax": lambda x, dim: _running(x, dim, operator.ge),
        "cummin": lambda x, dim: _running(x, dim, operator.le),
    }
)


def _order(x: Any, dim: int, descending: bool) -> Any:
    # A stable descending order: reverse, sort stably, reverse, and count from the other end.
    if not descending:
        return jnp.argsort(x, dim, stable=True)
    n = x.shape[dim]
    return n - 1 - jnp.flip(jnp.argsort(jnp.flip(x, dim), dim, stable=True), dim)


@rule("sort")
def _sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    order = _order(lax.stop_gradient(x), dim % x.ndim, descending)
    return jnp.take_along_axis(x, order, dim), order


rules({"sort.stable": lambda x, stable=None, dim=-1, descending=False: _sort(x, dim, descending)})


@rule("topk")
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    order = _order(lax.stop_gradient(x), dim % x.ndim, largest)
    order = lax.slice_in_dim(order, 0, k, axis=dim % x.ndim)
    return jnp.take_along_axis(x, order, dim), order


@rule("kthvalue")
def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if x.ndim == 0:
        return x, jnp.zeros((), int)
    order = _order(lax.stop_gradient(x), dim % x.ndim, False)
    return _pick(x, jnp.take(order, k - 1, axis=dim), dim % x.ndim, keepdim)


def _median_index(x: Any, dim: int, skip_nan: bool) -> Any:
    order = _order(x, dim, False)
    count = jnp.sum(~jnp.isnan(x), dim)
    middle = jnp.maximum(count - 1, 0) // 2
    if not skip_nan:
        middle = jnp.where(count < x.shape[dim], x.shape[dim] - 1, middle)
    return jnp.squeeze(jnp.take_along_axis(order, jnp.expand_dims(middle, dim), dim), dim)


def _median(x: Any, dim: int | None, keepdim: bool = False, skip_nan: bool = False) -> Any:
    x1, d = along(x if dim is not None else jnp.ravel(x), dim or 0)
    index = _median_index(lax.stop_gradient(x1), d, skip_nan)
    return _pick(x1, index, d, keepdim and x.ndim > 0)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _median_of_all(x: Any, skip_nan: bool) -> Any:
    return jnp.ravel(x)[_median_index(jnp.ravel(x), 0, skip_nan)]


@_median_of_all.defjvp
def _median_of_all_jvp(skip_nan: bool, primals: Any, tangents: Any) -> Any:
    # As in torch, all entries that equal the median share the derivative. (In the median along an
    # axis, the chosen entry gets all of it.)
    (x,), out = primals, _median_of_all(*primals, skip_nan)
    equal = jnp.where(jnp.isnan(out), jnp.isnan(x), x == out)
    # XLA may compute x twice, with different rounding, so that no entry equals ``out``. The index
    # of the median finds one entry in this case too.
    place = _median_index(jnp.ravel(x), 0, skip_nan)
    found = (jnp.arange(x.size) == place).reshape(x.shape)
    return out, jnp.mean(tangents[0], where=equal | found)


def _median_of(x: Any, skip_nan: bool = False) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _median_of_all(x, skip_nan)
    return _median(x, None, False, skip_nan)[0]


rules(
    {
        "median": _median_of,
        "median.dim": _median,
        "nanmedian": partial(_median_of, skip_nan=True),
        "nanmedian.dim": partial(_median, skip_nan=True),
    }
)


@rule("mode")
def _mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    x1, d = along(x, dim)
    moved = jnp.moveaxis(lax.stop_gradient(x1), d, -1)
    same = moved[..., :, None] == moved[..., None, :]
    count = same.sum(-1)
    most = count == count.max(-1, keepdims=True)
    smallest = jnp.where(most, moved, jnp.inf if moved.dtype.kind == "f" else moved.max())
    value = smallest.min(-1, keepdims=True)
    # As torch's CPU kernel, return the last position of the value.
    position = jnp.arange(moved.shape[-1])
    index = jnp.max(jnp.where(moved == value, position, -1), -1)
    return _pick(x1, index, d, keepdim and x.ndim > 0)


@rule("searchsorted.Tensor", "searchsorted.Scalar")
def _searchsorted(
    sequence: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    values = jnp.asarray(values)
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    which = "right" if right or side == "right" else "left"
    if sequence.ndim == 1:
        return jnp.searchsorted(sequence, values, side=which)
    find = lambda s, v: jnp.searchsorted(s, v, side=which)  # noqa: E731
    for _ in range(sequence.ndim - 1):
        find = jax.vmap(find)
    return find(sequence, values)


@rule("bucketize")
def _bucketize(x: Any, boundaries: Any, **options: Any) -> Any:
    return _searchsorted(boundaries, x, **options)
