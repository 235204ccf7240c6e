"""Views and copies: shapes, order and layout.  Strides do not exist in JAX; values do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from functx.compat._lowering._dtypes import to_jax_dtype
from functx.compat._lowering._table import rule


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


rule(
    "alias", "alias_copy", "clone", "contiguous", "lift", "lift_fresh", "lift_fresh_copy",
    "resolve_conj", "resolve_neg", "_version", "to.device", "functx::identity",
)(_same)  # fmt: skip


@rule("detach", "detach_copy")
def _detach(x: Any) -> Any:
    return lax.stop_gradient(x)


@jax.custom_jvp
def straight_through(value: Any, gradient_of: Any) -> Any:
    """The value of one array with the derivative of another, to the bit (nothing is added)."""
    return value


@straight_through.defjvp
def _straight_through_jvp(primals: Any, tangents: Any) -> Any:
    return straight_through(*primals), tangents[1]


rule("functx::straight_through")(straight_through)


@rule("_to_copy", "to.dtype", "to.dtype_layout")
def _to_copy(x: Any, *_: Any, **__: Any) -> Any:
    return x  # the interpreter gives it the traced dtype


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "view_copy", "_reshape_copy")
def _view(x: Any, size: Sequence[int], *_: Any) -> Any:
    return jnp.reshape(x, tuple(size))


@rule("view.dtype", context=True)
def _view_dtype(x: Any, dtype: Any, *, ctx: Any) -> Any:
    dtype = to_jax_dtype(dtype)
    old, new = x.dtype.itemsize, dtype.itemsize
    if new > old:
        x = x.reshape(*x.shape[:-1], x.shape[-1] * old // new, new // old)
    return jnp.reshape(lax.bitcast_convert_type(x, dtype), ctx.shape)


@rule("expand", "expand_copy")
def _expand(x: Any, size: Sequence[int], *, implicit: bool = False) -> Any:
    lead = len(size) - x.ndim
    shape = [x.shape[i - lead] if s == -1 else s for i, s in enumerate(size)]
    return jnp.broadcast_to(x, tuple(shape))


@rule("permute", "permute_copy")
def _permute(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, tuple(dims)) if x.ndim else x


@rule("t", "t_copy", "numpy_T")
def _t(x: Any) -> Any:
    return jnp.transpose(x)


@rule("transpose.int", "transpose_copy.int", "swapaxes")
def _transpose(x: Any, a: int, b: int) -> Any:
    return jnp.swapaxes(x, a, b) if x.ndim else x


@rule("unsqueeze", "unsqueeze_copy")
def _unsqueeze(x: Any, dim: int) -> Any:
    return jnp.expand_dims(x, dim)


@rule("squeeze", "squeeze_copy")
def _squeeze(x: Any) -> Any:
    return jnp.squeeze(x)


@rule("squeeze.dim", "squeeze.dims", "squeeze_copy.dim", "squeeze_copy.dims")
def _squeeze_dims(x: Any, dim: Any) -> Any:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return jnp.squeeze(x, tuple(d % x.ndim for d in dims if x.shape[d] == 1)) if x.ndim else x


def bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Start and end of a slice with torch's clamping."""
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    return start, end


@rule("slice.Tensor", "slice_copy.Tensor")
def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    low, high = bounds(start, end, x.shape[dim])
    return lax.slice_in_dim(x, low, high, step, axis=dim % x.ndim)


@rule("slice_scatter")
def _slice_scatter(
    x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    low, high = bounds(start, end, x.shape[dim])
    where = [slice(None)] * x.ndim
    where[dim] = slice(low, high, step)
    return x.at[tuple(where)].set(src.astype(x.dtype))


@rule("slice_backward")
def _slice_backward(
    g: Any, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Any:
    return _slice_scatter(jnp.zeros(tuple(input_sizes), g.dtype), g, dim, start, end, step)


@rule("select.int", "select_copy.int")
def _select(x: Any, dim: int, index: int) -> Any:
    return lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


@rule("select_scatter")
def _select_scatter(x: Any, src: Any, dim: int, index: int) -> Any:
    where: list[Any] = [slice(None)] * x.ndim
    where[dim] = index
    return x.at[tuple(where)].set(src.astype(x.dtype))


@rule("select_backward")
def _select_backward(g: Any, input_sizes: Sequence[int], dim: int, index: int) -> Any:
    return _select_scatter(jnp.zeros(tuple(input_sizes), g.dtype), g, dim, index)


@rule("narrow")
def _narrow(x: Any, dim: int, start: int, length: int) -> Any:
    return lax.slice_in_dim(x, start, start + length, axis=dim % x.ndim)


@rule("split.Tensor", "split_copy.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> Any:
    n = x.shape[dim]
    cuts = range(size, n, size) if size else []
    return tuple(jnp.split(x, list(cuts), dim))


@rule("split_with_sizes", "split_with_sizes_copy")
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    return tuple(jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim))


@rule("unbind.int", "unbind_copy.int")
def _unbind(x: Any, dim: int = 0) -> Any:
    return tuple(jnp.moveaxis(x, dim, 0))


@rule("unfold", "unfold_copy")
def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    if x.ndim == 0:
        return jnp.reshape(x, (size,))
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dim)
    return jnp.moveaxis(windows, dim % x.ndim + 1, -1)


@rule("unfold_backward")
def _unfold_backward(g: Any, sizes: Sequence[int], dim: int, size: int, step: int) -> Any:
    out = jnp.zeros(tuple(sizes), g.dtype)
    if not sizes:
        return jnp.reshape(g, ())
    dim = dim % len(sizes)
    starts = np.arange(0, sizes[dim] - size + 1, step)
    where = [slice(None)] * dim + [starts[:, None] + np.arange(size)]
    return out.at[tuple(where)].add(jnp.moveaxis(g, -1, dim + 1))


@rule("as_strided", "as_strided_copy")
def _as_strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = 0) -> Any:
    # Right for contiguous inputs, which is what functionalized graphs pass.
    index = np.full(tuple(size), offset or 0)
    for axis, (n, step) in enumerate(zip(size, stride)):
        index = index + (np.arange(n) * step).reshape((-1,) + (1,) * (len(size) - axis - 1))
    return jnp.ravel(x)[index]


@rule("as_strided_scatter")
def _as_strided_scatter(
    x: Any, src: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = 0
) -> Any:
    index = np.full(tuple(size), offset or 0)
    for axis, (n, step) in enumerate(zip(size, stride)):
        index = index + (np.arange(n) * step).reshape((-1,) + (1,) * (len(size) - axis - 1))
    return jnp.ravel(x).at[index].set(src).reshape(x.shape)


def diagonal_index(
    shape: Sequence[int], offset: int, dim1: int, dim2: int
) -> tuple[int, int, Any, Any]:
    """Both dims, and the row and column numbers of a diagonal."""
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    rows, columns = shape[dim1], shape[dim2]
    n = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    return dim1, dim2, np.arange(n) + max(-offset, 0), np.arange(n) + max(offset, 0)


@rule("diagonal", "diagonal_copy")
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


@rule("diagonal_scatter")
def _diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    d1, d2, i, j = diagonal_index(x.shape, offset, dim1, dim2)
    moved = jnp.moveaxis(x, (d1, d2), (-2, -1)).at[..., i, j].set(src.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (d1, d2))


@rule("diagonal_backward")
def _diagonal_backward(g: Any, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Any:
    return _diagonal_scatter(jnp.zeros(tuple(sizes), g.dtype), g, offset, dim1, dim2)


@rule("diag_embed")
def _diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    n = x.shape[-1] + abs(offset)
    i = np.arange(x.shape[-1])
    rows, columns = i + max(-offset, 0), i + max(offset, 0)
    out = jnp.zeros((*x.shape[:-1], n, n), x.dtype).at[..., rows, columns].set(x)
    return jnp.moveaxis(out, (-2, -1), (dim1, dim2))


@rule("cat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    # An empty 1-d tensor concatenates with anything, an old torch rule.
    if any(t.ndim > 1 for t in tensors):
        tensors = [t for t in tensors if t.shape != (0,)]
    dtype = jnp.result_type(*tensors)
    return jnp.concatenate([t.astype(dtype) for t in tensors], dim)


@rule("stack")
def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return jnp.stack(list(tensors), dim)


@rule("flip")
def _flip(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims)) if x.ndim and len(dims) else x


@rule("roll")
def _roll(x: Any, shifts: Any, dims: Any = ()) -> Any:
    if isinstance(dims, int) or len(dims):
        return jnp.roll(x, shifts, dims)
    return jnp.roll(x, shifts[0] if isinstance(shifts, list | tuple) else shifts)


@rule("rot90")
def _rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    return jnp.rot90(x, k, (dims[0], dims[1]))


@rule("repeat")
def _repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@rule("constant_pad_nd")
def _constant_pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    config = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        config[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


@rule("tril")
def _tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@rule("triu")
def _triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@rule("trace")
def _trace(x: Any) -> Any:
    return jnp.trace(x)


@rule("copy")
def _copy(x: Any, src: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(src, x.shape)


@rule("pixel_shuffle")
def _pixel_shuffle(x: Any, r: int) -> Any:
    *lead, c, h, w = x.shape
    x = x.reshape(*lead, c // (r * r), r, r, h, w)
    n = len(lead)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return x.transpose(order).reshape(*lead, c // (r * r), h * r, w * r)


@rule("pixel_unshuffle")
def _pixel_unshuffle(x: Any, r: int) -> Any:
    *lead, c, h, w = x.shape
    x = x.reshape(*lead, c, h // r, r, w // r, r)
    n = len(lead)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return x.transpose(order).reshape(*lead, c * r * r, h // r, w // r)
