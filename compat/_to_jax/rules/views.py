"""Views, copies and new arrays: shapes, order and layout. JAX arrays have no strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from functx._core import LoweringError
from functx.compat._bridge import to_jax_dtype
from functx.compat._to_jax.rules.table import rule, rules

Ints = Sequence[int]


def _same(x: Any, *_: Any, **__: Any) -> Any:
    """The argument. If an operation changes only the dtype, the interpreter converts the result."""
    return x


def _shaped(x: Any, *_: Any, ctx: Any, **__: Any) -> Any:
    return jnp.reshape(x, ctx.shape)


def _zeros(*_: Any, ctx: Any, **__: Any) -> Any:
    """Zeros, also for arrays that torch leaves uninitialized."""
    return jnp.zeros(ctx.shape, ctx.dtype)


@jax.custom_jvp
def straight_through(value: Any, gradient_of: Any) -> Any:
    """The value of one array with the derivative of another.

    The value is exact to the bit, because nothing is added to it.
    """
    return value


@straight_through.defjvp
def _straight_through_jvp(primals: Any, tangents: Any) -> Any:
    return straight_through(*primals), tangents[1]


rules(
    {
        "alias clone lift lift_fresh _to_copy prims::view_of prims::copy_strided": _same,
        "prims::convert_element_type": _same,
        "copy": lambda x, src, non_blocking=False: jnp.broadcast_to(src, x.shape),
        "detach": lambda x: lax.stop_gradient(x),
        "diagonal": jnp.diagonal,
        "empty new_empty empty_like empty_strided new_empty_strided empty_permuted": _zeros,
        "expand": lambda x, *_, ctx, **__: jnp.broadcast_to(x, ctx.shape),
        "flip prims::rev": lambda x, dims: jnp.flip(x, tuple(dims)) if x.ndim and len(dims) else x,
        "functx::straight_through": straight_through,
        "logspace": lambda a, b, steps, base=10.0, **_: jnp.logspace(a, b, steps, base=base),
        "ones ones_like new_ones": lambda *_, ctx, **__: jnp.ones(ctx.shape, ctx.dtype),
        "permute prims::transpose": lambda x, dims: jnp.transpose(x, tuple(dims)) if x.ndim else x,
        "prims::broadcast_in_dim": lambda x, shape, dims: lax.broadcast_in_dim(x, shape, dims),
        "prims::collapse prims::collapse_view prims::split_dim prims::squeeze": _shaped,
        "prims::iota": lambda n, *, start, step, **_: jnp.arange(n) * step + start,
        "repeat": lambda x, repeats: jnp.tile(x, tuple(repeats)),
        "scalar_tensor": lambda value, *, ctx, **_: jnp.asarray(value, ctx.dtype),
        "select.int": lambda x, dim, i: lax.index_in_dim(x, i, dim % x.ndim, keepdims=False),
        "split_with_sizes": lambda x, sizes, dim=0: jnp.split(x, np.cumsum(sizes)[:-1], dim),
        "stack": lambda tensors, dim=0: jnp.stack(list(tensors), dim),
        "t": jnp.transpose,
        "transpose.int": lambda x, a, b: jnp.swapaxes(x, a, b) if x.ndim else x,
        "tril": jnp.tril,
        "tril_indices": lambda m, n, k=0, **_: jnp.stack(jnp.tril_indices(m, k, n)),
        "triu": jnp.triu,
        "triu_indices": lambda m, n, k=0, **_: jnp.stack(jnp.triu_indices(m, k, n)),
        "unbind.int": lambda x, dim=0: tuple(jnp.moveaxis(x, dim, 0)),
        "unsqueeze squeeze squeeze.dim squeeze.dims": _shaped,
        "view reshape _unsafe_view _reshape_alias": _shaped,
        "zeros zeros_like new_zeros zero": _zeros,
    }
)


@rule("view.dtype")
def _view_dtype(x: Any, dtype: Any, *, ctx: Any) -> Any:
    dtype = to_jax_dtype(dtype)
    old, new = x.dtype.itemsize, dtype.itemsize
    if new > old:
        x = x.reshape(*x.shape[:-1], x.shape[-1] * old // new, new // old)
    return jnp.reshape(lax.bitcast_convert_type(x, dtype), ctx.shape)


@rule("full", "full_like", "new_full", "fill")
def _full(_: Any, *args: Any, ctx: Any, **kwargs: Any) -> Any:
    value: Any = kwargs.get("fill_value", args[-1] if args else None)
    return jnp.full(ctx.shape, value, ctx.dtype)


@rule("arange", "arange.start", "arange.start_step")
def _arange(*args: Any, ctx: Any, **kwargs: Any) -> Any:
    # torch's decomposition counts in float64.
    names = ("end",) if len(args) == 1 and "end" not in kwargs else ("start", "end", "step")
    given = dict(zip(names, args)) | kwargs
    wide = jnp.promote_types(ctx.dtype, jnp.float32)
    whole = jnp.issubdtype(ctx.dtype, jnp.integer)
    count = jnp.arange(ctx.shape[0]).astype(int if whole else wide)
    return (count * given.get("step", 1) + given.get("start", 0)).astype(ctx.dtype)


def _slice_of(x: Any, dim: int, start: int | None, end: int | None, step: int) -> Any:
    where = [slice(None)] * x.ndim
    where[dim] = slice(start, end, step)
    return tuple(where)


@rule("slice.Tensor")
def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[_slice_of(x, dim, start, end, step)]


@rule("slice_scatter")
def _slice_scatter(
    x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return x.at[_slice_of(x, dim, start, end, step)].set(src.astype(x.dtype))


@rule("unfold")
def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    if x.ndim == 0:
        return jnp.reshape(x, (size,))
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dim)
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


def _in_memory(ctx: Any, size: Ints, stride: Ints, offset: int | None) -> tuple[Ints, Any]:
    """How ``as_strided`` reads memory: the memory order of dimensions, and the indices it reads."""
    like = ctx.node.args[0].meta["val"]
    order = sorted(range(like.ndim), key=lambda d: (-like.stride(d), like.shape[d] == 1))
    start = like.storage_offset()
    index = np.full(tuple(size), (start if offset is None else offset) - start)
    for axis, (n, step) in enumerate(zip(size, stride)):
        index = index + (np.arange(n) * step).reshape((-1,) + (1,) * (len(size) - axis - 1))
    reached = not index.size or 0 <= index.min() <= index.max() < like.numel()
    if not (reached and like.permute(order).is_contiguous()):
        raise LoweringError(
            "its argument is a view of another tensor, whose memory it reads. Use unfold or"
            " slices, or pass the other tensor"
        )
    return order, index


@rule("as_strided")
def _as_strided(x: Any, size: Ints, stride: Ints, offset: int | None = None, *, ctx: Any) -> Any:
    order, index = _in_memory(ctx, size, stride, offset)
    return jnp.ravel(jnp.transpose(x, order))[index]


@rule("as_strided_scatter")
def _as_strided_scatter(
    x: Any, src: Any, size: Ints, stride: Ints, offset: int | None = None, *, ctx: Any
) -> Any:
    order, index = _in_memory(ctx, size, stride, offset)
    memory = jnp.transpose(x, order)
    written = jnp.ravel(memory).at[index].set(src).reshape(memory.shape)
    return jnp.transpose(written, np.argsort(order).tolist())


@rule("diagonal_scatter")
def _diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    n = src.shape[-1]
    rows, columns = np.arange(n) + max(-offset, 0), np.arange(n) + max(offset, 0)
    moved = moved.at[..., rows, columns].set(src.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@rule("cat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    # torch still allows an empty 1-d tensor among tensors of any shape.
    if any(t.ndim > 1 for t in tensors):
        tensors = [t for t in tensors if t.shape != (0,)]
    dtype = jnp.result_type(*tensors)
    return jnp.concatenate([t.astype(dtype) for t in tensors], dim)


@rule("constant_pad_nd")
def _constant_pad(x: Any, pad: Ints, value: Any = 0) -> Any:
    config = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        config[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)
