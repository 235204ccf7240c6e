"""Creation of arrays from shapes and numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from functx.compat._lowering._table import rule


@rule("full", "full_like", "new_full", context=True)
def _full(_: Any, *args: Any, ctx: Any, **kwargs: Any) -> Any:
    value: Any = kwargs.get("fill_value", args[-1] if args else None)
    return jnp.full(ctx.shape, value, ctx.dtype)


@rule("fill", "fill.Scalar", "fill.Tensor", context=True)
def _fill(x: Any, value: Any, *, ctx: Any) -> Any:
    return jnp.full(ctx.shape, value, ctx.dtype)


@rule("zeros", "zeros_like", "new_zeros", "zero", "_efficientzerotensor", context=True)
def _zeros(*_: Any, ctx: Any, **__: Any) -> Any:
    return jnp.zeros(ctx.shape, ctx.dtype)


@rule("ones", "ones_like", "new_ones", context=True)
def _ones(*_: Any, ctx: Any, **__: Any) -> Any:
    return jnp.ones(ctx.shape, ctx.dtype)


# Memory that torch leaves undefined is zero here: any value is a right one.
rule("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", context=True)(_zeros)
rule("empty_permuted", context=True)(_zeros)


@rule("scalar_tensor", context=True)
def _scalar_tensor(value: Any, *, ctx: Any, **_: Any) -> Any:
    return jnp.asarray(value, ctx.dtype)


@rule("arange", "arange.start", "arange.start_step", context=True)
def _arange(*args: Any, ctx: Any, **kwargs: Any) -> Any:
    names = ("end",) if len(args) == 1 and "end" not in kwargs else ("start", "end", "step")
    given = dict(zip(names, args)) | kwargs
    start, step = given.get("start", 0), given.get("step", 1)
    count = jnp.arange(ctx.shape[0])
    if jnp.issubdtype(ctx.dtype, jnp.integer):
        return (count * step + start).astype(ctx.dtype)
    wide = jnp.promote_types(ctx.dtype, jnp.float32)
    return (count.astype(wide) * step + start).astype(ctx.dtype)


@rule("linspace", context=True)
def _linspace(start: Any, end: Any, steps: int, *, ctx: Any, **_: Any) -> Any:
    return jnp.linspace(start, end, steps, dtype=ctx.dtype)


@rule("logspace", context=True)
def _logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, ctx: Any, **_: Any) -> Any:
    return jnp.logspace(start, end, steps, base=base).astype(ctx.dtype)


@rule("eye", "eye.m", context=True)
def _eye(*_: Any, ctx: Any, **__: Any) -> Any:
    rows, columns = ctx.shape
    return jnp.eye(rows, columns, dtype=ctx.dtype)


@rule("tril_indices", context=True)
def _tril_indices(row: int, col: int, offset: int = 0, *, ctx: Any, **_: Any) -> Any:
    return jnp.stack(jnp.tril_indices(row, offset, col)).astype(ctx.dtype)


@rule("triu_indices", context=True)
def _triu_indices(row: int, col: int, offset: int = 0, *, ctx: Any, **_: Any) -> Any:
    return jnp.stack(jnp.triu_indices(row, offset, col)).astype(ctx.dtype)
