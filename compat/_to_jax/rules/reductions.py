"""Reductions, cumulative sums, histograms and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._to_jax.rules.pointwise import absolute, logaddexp
from functx.compat._to_jax.rules.table import rule, rules

Dims = int | Sequence[int] | None


def axes(dim: Dims, ndim: int) -> tuple[int, ...]:
    """The axes for torch's ``dim`` argument. None and [] stand for all axes."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % ndim for d in dims) if ndim else ()


def along(x: Any, dim: int) -> tuple[Any, int]:
    """``x`` with at least one axis, and ``dim`` as its axis (torch allows dim=0 for a scalar)."""
    x = jnp.atleast_1d(x)
    return x, dim % x.ndim


def _accumulate(x: Any, dtype: Any) -> Any:
    # bool and small integers are summed in the result type, 16-bit floats in float32.
    if jnp.issubdtype(dtype, jnp.floating):
        return x.astype(jnp.promote_types(dtype, jnp.float32))
    return x.astype(dtype)


def _reducing(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Any, dim: Dims = None, keepdim: bool = False, *_: Any, **__: Any) -> Any:
        return reduce(x, axes(dim, x.ndim), keepdims=keepdim)

    return reduced


def _extreme(find: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
    """The maximum or minimum. Entries that equal it, and NaNs, share the derivative."""

    @jax.custom_jvp
    def last(x: Any) -> Any:
        return find(x, -1)

    @last.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), out = primals, last(*primals)
        equal = (x == out[..., None]) | jnp.isnan(x)
        # XLA may compute x twice, with different rounding. Then no entry equals ``out``, and
        # JAX's own derivative would be 0 / 0.
        found = jax.nn.one_hot(place(x, -1), x.shape[-1], dtype=bool)
        return out, jnp.mean(tangents[0], -1, where=found | equal)

    def extreme(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
        dims = axes(dim, x.ndim)
        rest = [d for d in range(x.ndim) if d not in dims]
        out = last(lax.collapse(jnp.atleast_1d(x.transpose(*rest, *dims)), len(rest)))
        return jnp.expand_dims(out, dims) if keepdim else out

    return extreme


largest, smallest = _extreme(jnp.max, jnp.argmax), _extreme(jnp.min, jnp.argmin)


def _accumulating(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Any, dim: Dims = None, keepdim: bool = False, *, ctx: Any, **_: Any) -> Any:
        return reduce(_accumulate(x, ctx.dtype), axes(dim, x.ndim), keepdims=keepdim)

    return reduced


def _place_of(choose: Callable[..., Any]) -> Callable[..., Any]:
    def place(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        return choose(x, dim, keepdims=keepdim) if x.ndim else jnp.zeros((), int)

    return place


def _cumulative(accumulate: Callable[..., Any]) -> Callable[..., Any]:
    def accumulated(x: Any, dim: int, *, ctx: Any, **_: Any) -> Any:
        return accumulate(x.astype(ctx.dtype), dim % x.ndim) if x.ndim else x

    return accumulated


def _log_of_sums(x: Any, axis: int) -> Any:
    if not jnp.iscomplexobj(x) or not x.size:
        return lax.cumlogsumexp(x, axis)
    # One after the other, as torch does: the angles of `logaddexp` depend on the order.
    rows = jnp.moveaxis(x, axis, 0)
    first = rows[0]
    _, rest = lax.scan(lambda sum_, row: (logaddexp(row, sum_),) * 2, first, rows[1:])
    return jnp.moveaxis(jnp.concatenate([first[None], rest]), 0, axis)


rules(
    {
        "all all.dim all.dims _is_all_true": _reducing(jnp.all),
        "amax max prims::amax": largest,
        "amin min prims::amin": smallest,
        "any any.dim any.dims _is_any_true": _reducing(jnp.any),
        "argmax": _place_of(jnp.argmax),
        "argmin": _place_of(jnp.argmin),
        "cumprod": _cumulative(jnp.cumprod),
        "cumsum": _cumulative(jnp.cumsum),
        "logcumsumexp": _cumulative(_log_of_sums),
        "logsumexp": _accumulating(jax.nn.logsumexp),
        "mean": _accumulating(jnp.mean),
        "prod prims::prod": _accumulating(jnp.prod),
        "sum prims::sum": _accumulating(jnp.sum),
    }
)


def _moments(x: Any, dim: Dims, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    dims = axes(dim, x.ndim)
    n = math.prod(x.shape[d] for d in dims)
    mean = jnp.mean(x, dims, keepdims=True)
    apart = x - mean
    # Not by `abs`, whose derivative is zero where an element is the mean.
    square = jnp.real(apart * jnp.conj(apart)) if jnp.iscomplexobj(x) else jnp.square(apart)
    squares = jnp.sum(square, dims, keepdims=keepdim)
    free = max(n - (1 if correction is None else correction), 0)
    var = squares / free if free else squares / jnp.zeros(())
    return var, mean if keepdim else jnp.squeeze(mean, dims)


def _moment(give: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def moment(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        return give(*_moments(x, dim, correction, keepdim))

    return moment


rules(
    {
        "std.correction": _moment(lambda var, mean: _root(var, 2)),
        "std_mean.correction": _moment(lambda var, mean: (_root(var, 2), mean)),
        "var.correction": _moment(lambda var, mean: var),
        "var_mean.correction": _moment(lambda var, mean: (var, mean)),
    }
)


@rule("histc")
def _histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    low, high = (jnp.min(x), jnp.max(x)) if min == max else (min, max)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    # As in torch, the quotient gives the bin. Comparing with edges would put values next to a
    # rounded edge in another bin.
    x = x.ravel()
    place = jnp.floor((x - low) * bins / (high - low)).astype(int)
    counts = ((x >= low) & (x <= high)).astype(x.dtype)
    return jnp.zeros(bins, x.dtype).at[jnp.clip(place, 0, bins - 1)].add(counts)


@rule("histogram.bin_ct")
def _histogram(
    x: Any, bins: int = 100, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    if range is None:
        low, high = jnp.min(x, initial=jnp.inf), jnp.max(x, initial=-jnp.inf)
        low, high = jnp.where(low == high, low - 0.5, low), jnp.where(low == high, high + 0.5, high)
        range = (low, high) if x.size else (0, 1)
    elif range[0] == range[1]:
        range = (range[0] - 0.5, range[1] + 0.5)
    flat = None if weight is None else weight.ravel()
    return jnp.histogram(x.ravel(), bins, tuple(range), flat, density)


@rule("histogram.bins_tensor")
def _histogram_edges(x: Any, edges: Any, *, weight: Any = None, density: bool = False) -> Any:
    flat = None if weight is None else weight.ravel()
    return jnp.histogram(x.ravel(), edges, weights=flat, density=density)


@rule("linalg_vector_norm")
def _vector_norm(
    x: Any, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, ctx: Any
) -> Any:
    x = x.astype(jnp.promote_types(x.dtype, ctx.dtype))
    return vector_norm(x, ord, axes(dim, x.ndim), keepdim)


def vector_norm(x: Any, ord: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """The vector norm over some axes. Where it is zero, its derivative is zero, as in torch."""
    if ord == 0:
        return jnp.sum(x != 0, dims, keepdims=keepdim)
    size = absolute(x)
    if ord == float("inf"):
        return largest(size, dims, keepdim)
    if ord == float("-inf"):
        return smallest(size, dims, keepdim)
    if ord == 1:
        return jnp.sum(size, dims, keepdims=keepdim)
    if ord == 2:
        return _root(jnp.sum(jnp.real(x * jnp.conj(x)), dims, keepdims=keepdim), 2)
    return _root(jnp.sum(_power(size, ord), dims, keepdims=keepdim), ord)


def _power(size: Any, ord: float) -> Any:
    zero = size == 0
    return jnp.where(zero, 0.0 if ord > 0 else jnp.inf, jnp.where(zero, 1.0, size) ** ord)


def _root(x: Any, ord: float) -> Any:
    # Where a norm or a deviation is zero, torch's derivative is zero, not 0 * inf.
    zero = x == 0
    inner = jnp.where(zero, 1.0, x)
    root = jnp.sqrt(inner) if ord == 2 else inner ** (1 / ord)
    return jnp.where(zero, 0.0 if ord > 0 else jnp.inf, root)
