"""Embeddings, whose derivative torch defines apart from their value.

The row of ``padding_idx`` has no gradient; with ``scale_grad_by_freq`` a row's is divided by how
often it was read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._to_jax.rules.table import rule


@jax.custom_jvp
def _differentiated_as(x: Any, factor: Any) -> Any:
    """``x``, with the derivative of ``factor * x``."""
    return x


@_differentiated_as.defjvp
def _differentiated_as_jvp(primals: Any, tangents: Any) -> Any:
    x, factor = primals
    return x, tangents[0] * factor.astype(x.dtype)


def _reads(indices: Any, rows: int, dtype: Any) -> Any:
    """How often the row that an index names was read, for each index."""
    return jnp.zeros(rows, dtype).at[indices.reshape(-1)].add(1)[indices]


@rule("embedding")
def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:  # fmt: skip
    rows = weight[indices]
    if padding_idx < 0 and not scale_grad_by_freq:
        return rows
    factor = jnp.where(indices == padding_idx, 0, 1) if padding_idx >= 0 else jnp.ones_like(indices)
    if scale_grad_by_freq:
        factor = factor / _reads(indices, weight.shape[0], weight.dtype)
    return _differentiated_as(rows, factor[..., None])


_SUM, _MEAN, _MAX = 0, 1, 2


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: bool = False, mode: int = _SUM,
    sparse: bool = False, per_sample_weights: Any = None, include_last_offset: bool = False,
    padding_idx: int = -1, *, ctx: Any,
) -> Any:  # fmt: skip
    n = offsets.shape[0] - (1 if include_last_offset else 0)
    bag = jnp.searchsorted(offsets[:n], jnp.arange(indices.shape[0]), side="right") - 1
    real = indices != padding_idx
    rows = weight[indices]
    if scale_grad_by_freq:
        rows = _differentiated_as(rows, 1 / _reads(indices, weight.shape[0], weight.dtype)[:, None])
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    count = jnp.zeros(n, indices.dtype).at[bag].add(real.astype(indices.dtype))
    shape = (n, weight.shape[1])
    winner = jnp.zeros((0,), indices.dtype)
    if mode == _MAX:
        low = jnp.where(real[:, None], rows, -jnp.inf)
        top = jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(lax.stop_gradient(low))
        hit = (rows == top[bag]) & real[:, None]
        place = jnp.where(hit, jnp.arange(indices.shape[0])[:, None], indices.shape[0])
        first = jnp.full(shape, indices.shape[0]).at[bag].min(place)
        # The first of equals has all of the gradient.
        at = jnp.minimum(first, max(indices.shape[0] - 1, 0))
        found = first < indices.shape[0]
        out = jnp.where(found, jnp.take_along_axis(rows, at, 0), 0) if indices.size else top * 0
        winner = indices[at]
    else:
        out = jnp.zeros(shape, rows.dtype).at[bag].add(jnp.where(real[:, None], rows, 0))
        out = out / jnp.maximum(count, 1)[:, None] if mode == _MEAN else out
    # Torch leaves the bookkeeping empty where its kernel does not need it.
    shapes = [tuple(v.shape) for v in ctx.node.meta["val"]]
    kept = [x if x.shape == s else jnp.zeros(s, x.dtype)
            for x, s in zip((bag, count, winner), shapes[1:])]  # fmt: skip
    return out, *kept
