"""Reductions, cumulative sums, histograms and norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._lowering._table import rule

Dims = int | Sequence[int] | None


def axes(dim: Dims, ndim: int) -> tuple[int, ...]:
    """The axes that torch's ``dim`` argument means: None and [] mean all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % ndim for d in dims) if ndim else ()


def along(x: Any, dim: int) -> tuple[Any, int]:
    """``x`` with at least one axis, and ``dim`` in it (torch lets ``dim=0`` on a scalar)."""
    x = jnp.atleast_1d(x)
    return x, dim % x.ndim


def _accumulate(x: Any, dtype: Any) -> Any:
    # bool and small integers are summed in the result type, 16-bit floats in float32.
    if jnp.issubdtype(dtype, jnp.floating):
        return x.astype(jnp.promote_types(dtype, jnp.float32))
    return x.astype(dtype)


@rule("sum", context=True)
def _sum(x: Any, *, dtype: Any = None, ctx: Any) -> Any:
    return jnp.sum(_accumulate(x, ctx.dtype))


@rule("sum.dim_IntList", context=True)
def _sum_dim(x: Any, dim: Dims, keepdim: bool = False, *, dtype: Any = None, ctx: Any) -> Any:
    return jnp.sum(_accumulate(x, ctx.dtype), axes(dim, x.ndim), keepdims=keepdim)


@rule("nansum", context=True)
def _nansum(x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, ctx: Any) -> Any:
    return jnp.nansum(_accumulate(x, ctx.dtype), axes(dim, x.ndim), keepdims=keepdim)


@rule("mean", context=True)
def _mean(x: Any, *, dtype: Any = None, ctx: Any) -> Any:
    return jnp.mean(_accumulate(x, ctx.dtype))


@rule("mean.dim", context=True)
def _mean_dim(x: Any, dim: Dims, keepdim: bool = False, *, dtype: Any = None, ctx: Any) -> Any:
    return jnp.mean(_accumulate(x, ctx.dtype), axes(dim, x.ndim), keepdims=keepdim)


@rule("prod", context=True)
def _prod(x: Any, *, dtype: Any = None, ctx: Any) -> Any:
    return jnp.prod(_accumulate(x, ctx.dtype))


@rule("prod.dim_int", context=True)
def _prod_dim(x: Any, dim: int, keepdim: bool = False, *, dtype: Any = None, ctx: Any) -> Any:
    return jnp.prod(_accumulate(x, ctx.dtype), axes(dim, x.ndim), keepdims=keepdim)


def _moments(x: Any, dim: Dims, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    dims = axes(dim, x.ndim)
    n = 1
    for d in dims:
        n *= x.shape[d]
    mean = jnp.mean(x, dims, keepdims=True)
    squares = jnp.sum(jnp.square(jnp.abs(x - mean)), dims, keepdims=keepdim)
    free = max(n - (1 if correction is None else correction), 0)
    var = squares / free if free else squares / jnp.zeros(())
    return var, mean if keepdim else jnp.squeeze(mean, dims)


@rule("var.correction")
def _var(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _moments(x, dim, correction, keepdim)[0]


@rule("std.correction")
def _std(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _safe_sqrt(_moments(x, dim, correction, keepdim)[0])


@rule("var_mean.correction")
def _var_mean(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _moments(x, dim, correction, keepdim)


@rule("std_mean.correction")
def _std_mean(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    var, mean = _moments(x, dim, correction, keepdim)
    return _safe_sqrt(var), mean


@rule("var", "var.dim")
def _var_old(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return _moments(x, dim, int(unbiased), keepdim)[0]


def _safe_sqrt(x: Any) -> Any:
    # torch's std has derivative 0, not NaN, where all elements are equal.
    zero = x == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, x)))


@rule("amax")
def _amax(x: Any, dim: Dims = (), keepdim: bool = False) -> Any:
    return jnp.max(x, axes(dim, x.ndim), keepdims=keepdim)


@rule("amin")
def _amin(x: Any, dim: Dims = (), keepdim: bool = False) -> Any:
    return jnp.min(x, axes(dim, x.ndim), keepdims=keepdim)


@rule("aminmax")
def _aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = axes(dim, x.ndim)
    return jnp.min(x, dims, keepdims=keepdim), jnp.max(x, dims, keepdims=keepdim)


@rule("argmax")
def _argmax_rule(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    if x.ndim == 0:
        return jnp.zeros((), int)
    return jnp.argmax(x, dim, keepdims=keepdim)


@rule("argmin")
def _argmin_rule(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    if x.ndim == 0:
        return jnp.zeros((), int)
    return jnp.argmin(x, dim, keepdims=keepdim)


@rule("any", "any.dim", "any.dims", "_is_any_true")
def _any(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    return jnp.any(x.astype(bool), axes(dim, x.ndim), keepdims=keepdim)


@rule("all", "all.dim", "all.dims", "_is_all_true")
def _all(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    return jnp.all(x.astype(bool), axes(dim, x.ndim), keepdims=keepdim)


@rule("count_nonzero.dim_IntList", "count_nonzero")
def _count_nonzero(x: Any, dim: Dims = None) -> Any:
    return jnp.sum(x != 0, axes(dim, x.ndim))


@rule("logsumexp", context=True)
def _logsumexp(x: Any, dim: Dims, keepdim: bool = False, *, ctx: Any) -> Any:
    return jax.nn.logsumexp(x.astype(ctx.dtype), axes(dim, x.ndim), keepdims=keepdim)


@rule("cumsum", context=True)
def _cumsum(x: Any, dim: int, *, dtype: Any = None, ctx: Any) -> Any:
    return jnp.cumsum(x.astype(ctx.dtype), dim) if x.ndim else x


@rule("cumprod", context=True)
def _cumprod(x: Any, dim: int, *, dtype: Any = None, ctx: Any) -> Any:
    return jnp.cumprod(x.astype(ctx.dtype), dim) if x.ndim else x


@rule("logcumsumexp")
def _logcumsumexp(x: Any, dim: int) -> Any:
    return lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x


@rule("histc")
def _histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    low, high = (jnp.min(x), jnp.max(x)) if min == max else (min, max)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    return jnp.histogram(x, bins, (low, high))[0]


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


@rule("linalg_vector_norm", context=True)
def _vector_norm(
    x: Any, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None, ctx: Any
) -> Any:
    x = x.astype(jnp.promote_types(x.dtype, ctx.dtype))
    return vector_norm(x, ord, axes(dim, x.ndim), keepdim)


def vector_norm(x: Any, ord: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """The vector norm over some axes, with torch's derivative (zero) where it is zero."""
    if ord == 0:
        return jnp.sum(x != 0, dims, keepdims=keepdim)
    size = jnp.abs(x)
    if ord == float("inf"):
        return jnp.max(size, dims, keepdims=keepdim)
    if ord == float("-inf"):
        return jnp.min(size, dims, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(size, dims, keepdims=keepdim)
    if ord == 2:
        return _root(jnp.sum(jnp.real(x * jnp.conj(x)), dims, keepdims=keepdim), 2)
    return _root(jnp.sum(_power(size, ord), dims, keepdims=keepdim), ord)


def _power(size: Any, ord: float) -> Any:
    zero = size == 0
    return jnp.where(zero, 0.0 if ord > 0 else jnp.inf, jnp.where(zero, 1.0, size) ** ord)


def _root(x: Any, ord: float) -> Any:
    # Where the norm is zero torch's derivative is zero, not 0 * inf.
    zero = x == 0
    inner = jnp.where(zero, 1.0, x)
    root = jnp.sqrt(inner) if ord == 2 else inner ** (1 / ord)
    return jnp.where(zero, 0.0 if ord > 0 else jnp.inf, root)
