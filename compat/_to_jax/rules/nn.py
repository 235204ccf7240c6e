"""Losses, embeddings, attention, and the LSTM operation to which recurrent layers decompose.

torch defines the derivative of an embedding separately from its value: the row of ``padding_idx``
has no gradient, and with ``scale_grad_by_freq`` the gradient of a row is divided by the number of
times that the row was read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from functx.compat._to_jax.rules.linalg import matmul
from functx.compat._to_jax.rules.pointwise import absolute
from functx.compat._to_jax.rules.table import rule
from functx.compat._to_jax.rules.views import straight_through

_NONE, _MEAN = 0, 1
_OF_SUMS, _OF_MAXIMA = 0, 2


def _reduce(loss: Any, reduction: int) -> Any:
    if reduction == _NONE:
        return loss
    return jnp.mean(loss) if reduction == _MEAN else jnp.sum(loss)


@rule("binary_cross_entropy")
def _bce(x: Any, y: Any, weight: Any = None, reduction: int = _MEAN) -> Any:
    loss = _entropy(x, y)
    return _reduce(loss if weight is None else loss * weight, reduction)


@rule("binary_cross_entropy_backward")
def _bce_backward(g: Any, x: Any, y: Any, weight: Any = None, reduction: int = _MEAN) -> Any:
    g = g * _entropy_slope(x, y)
    g = g if weight is None else g * weight
    return g / x.size if reduction == _MEAN else g


# torch clamps the logarithms at -100, and keeps denominators of derivatives away from zero.
_EPSILON = 1e-12


@jax.custom_jvp
def _entropy(x: Any, y: Any) -> Any:
    log = lambda x: jnp.maximum(jnp.log(x), -100)  # noqa: E731
    return -(y * log(x) + (1 - y) * log(1 - x))


@_entropy.defjvp
def _entropy_jvp(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    return _entropy(x, y), dx * _entropy_slope(x, y) + dy * (jnp.log1p(-x) - jnp.log(x))


@jax.custom_jvp
def _entropy_slope(x: Any, y: Any) -> Any:
    return (x - y) / jnp.maximum((1 - x) * x, _EPSILON)


@_entropy_slope.defjvp
def _entropy_slope_jvp(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    bend = (x * x - 2 * x * y + y) / ((x + _EPSILON) * (1 - x + _EPSILON)) ** 2
    return _entropy_slope(x, y), dx * bend - dy / jnp.maximum((1 - x) * x, _EPSILON)


@rule("huber_loss")
def _huber(x: Any, y: Any, reduction: int = _MEAN, delta: float = 1.0) -> Any:
    # Square the residual itself: its absolute value has a kink at zero.
    z = x - y
    outside = delta * (absolute(z) - 0.5 * delta)
    return _reduce(jnp.where(jnp.abs(z) < delta, 0.5 * z * z, outside), reduction)


@rule("smooth_l1_loss")
def _smooth_l1(x: Any, y: Any, reduction: int = _MEAN, beta: float = 1.0) -> Any:
    z = x - y
    if beta == 0:
        return _reduce(absolute(z), reduction)
    inside = 0.5 * z * z / beta
    return _reduce(jnp.where(jnp.abs(z) < beta, inside, absolute(z) - 0.5 * beta), reduction)


@rule("multi_margin_loss")
def _multi_margin(
    x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = _MEAN
) -> Any:
    # torch's decomposition gives a derivative to a margin that is met exactly; its kernel does not.
    rows, labels = jnp.atleast_2d(x), jnp.atleast_1d(target)[:, None]
    z = margin - jnp.take_along_axis(rows, labels, 1) + rows
    counts = (z > 0) & (jnp.arange(rows.shape[1]) != labels)
    z = jnp.where(counts, z, 0)
    z = z if p == 1 else z * z
    z = z if weight is None else z * weight[labels]
    loss = jnp.sum(z, 1) / rows.shape[1]
    return _reduce(loss if target.ndim else loss[0], reduction)


@rule("multi_margin_loss_backward")
def _multi_margin_backward(
    g: Any, x: Any, target: Any, p: Any, margin: Any, weight: Any = None, reduction: int = _MEAN
) -> Any:
    loss = lambda x: _multi_margin(x, target, p, margin, weight, reduction)  # noqa: E731
    return jax.vjp(loss, x)[1](g)[0]


@rule("multilabel_margin_loss_forward")
def _multilabel(x: Any, target: Any, reduction: int = _MEAN) -> Any:
    # torch's decomposition also counts labels after the first negative one; its kernel does not.
    rows, labels = (jnp.atleast_2d(a) for a in (x, target))
    real = jnp.cumsum(labels < 0, -1) == 0
    named = jnp.where(real, labels, 0)
    hot = jax.nn.one_hot(named, rows.shape[-1], dtype=bool) & real[..., None]
    is_target = jnp.any(hot, 1)
    picked = jnp.take_along_axis(rows, named, -1)
    margins = 1 - picked[:, :, None] + rows[:, None, :]
    counts = real[:, :, None] & ~is_target[:, None, :] & (margins > 0)
    loss = jnp.sum(jnp.where(counts, margins, 0), (1, 2)) / rows.shape[-1]
    loss = loss.reshape(target.shape[:-1])
    return _reduce(loss, reduction), is_target.reshape(target.shape).astype(x.dtype)


@rule("multilabel_margin_loss_backward")
def _multilabel_backward(g: Any, x: Any, target: Any, reduction: int, is_target: Any) -> Any:
    return jax.vjp(lambda x: _multilabel(x, target, reduction)[0], x)[1](g)[0]


def _reads(indices: Any, rows: int, dtype: Any) -> Any:
    """For each index, the number of times that its row is read."""
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
    return straight_through(rows, rows * factor[..., None].astype(rows.dtype))


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: bool = False, mode: int = _OF_SUMS,
    sparse: bool = False, per_sample_weights: Any = None, include_last_offset: bool = False,
    padding_idx: int = -1, *, ctx: Any,
) -> Any:  # fmt: skip
    n = offsets.shape[0] - (1 if include_last_offset else 0)
    bag = jnp.searchsorted(offsets[:n], jnp.arange(indices.shape[0]), side="right") - 1
    real = indices != padding_idx
    rows = weight[indices]
    if scale_grad_by_freq:
        often = _reads(indices, weight.shape[0], weight.dtype)
        rows = straight_through(rows, rows / often[:, None])
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    count = jnp.zeros(n, indices.dtype).at[bag].add(real.astype(indices.dtype))
    shape = (n, weight.shape[1])
    winner = jnp.zeros((0,), indices.dtype)
    if mode == _OF_MAXIMA:
        low = jnp.where(real[:, None], rows, -jnp.inf)
        top = jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(lax.stop_gradient(low))
        hit = (rows == top[bag]) & real[:, None]
        place = jnp.where(hit, jnp.arange(indices.shape[0])[:, None], indices.shape[0])
        first = jnp.full(shape, indices.shape[0]).at[bag].min(place)
        # Of several equal maxima, the first gets the whole gradient.
        at = jnp.minimum(first, max(indices.shape[0] - 1, 0))
        found = first < indices.shape[0]
        out = jnp.where(found, jnp.take_along_axis(rows, at, 0), 0) if indices.size else top * 0
        winner = indices[at]
    else:
        out = jnp.zeros(shape, rows.dtype).at[bag].add(jnp.where(real[:, None], rows, 0))
        out = out / jnp.maximum(count, 1)[:, None] if mode == _MEAN else out
    # torch returns empty bookkeeping tensors if its kernel does not need them.
    shapes = [tuple(v.shape) for v in ctx.node.meta["val"]]
    kept = [x if x.shape == s else jnp.zeros(s, x.dtype)
            for x, s in zip((bag, count, winner), shapes[1:])]  # fmt: skip
    return out, *kept


def _attention(
    q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None
) -> tuple[Any, Any]:
    """Softmax attention over the last two axes, and its log normaliser."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.ndim > 2 and k.shape[-3] != q.shape[-3]:  # groups of queries share keys and values
        k, v = (jnp.repeat(x, q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = matmul(q, jnp.swapaxes(k, -1, -2)) * scale
    if causal:
        keep = np.tril(np.ones(scores.shape[-2:], bool))
        scores = jnp.where(keep, scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    top = jnp.max(lax.stop_gradient(scores), -1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)
    e = jnp.exp(scores - top)
    total = jnp.sum(e, -1, keepdims=True)
    # A row without any key gives zeros, not NaN, as torch's kernels do.
    weights = jnp.where(total == 0, 0, e / jnp.where(total == 0, 1, total))
    log_total = jnp.log(jnp.where(total == 0, 1, total)) + top
    return matmul(weights, v), log_total[..., 0]


@rule("_scaled_dot_product_flash_attention_for_cpu")
def _flash(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False,
    *, attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    return _attention(q, k, v, attn_mask, is_causal, scale)


@rule("_scaled_dot_product_flash_attention_for_cpu_backward")
def _flash_backward(
    g: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, dropout_p: float, is_causal: bool,
    *, attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    run = lambda q, k, v: _attention(q, k, v, attn_mask, is_causal, scale)[0]  # noqa: E731
    return jax.vjp(run, q, k, v)[1](g)


def _lstm(tensors: Any, reverse: bool, has_biases: bool) -> Any:
    """One layer in one direction: ``x`` is (time, batch, features)."""
    x, w, u, *biases, hx, cx = tensors
    inputs = matmul(x, w.T) + (sum(biases) if has_biases else 0)

    def step(state: Any, gates: Any) -> Any:
        h, cell = state
        i, f, g, o = jnp.split(gates + matmul(h, u.T), 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (h, cell), h

    shape = hx.shape
    start = hx.reshape(shape[-2:]), cx.reshape(shape[-2:])
    (h, cell), out = lax.scan(step, start, inputs, reverse=reverse)
    return out, h.reshape(shape), cell.reshape(shape)


@rule("mkldnn_rnn_layer")
def _rnn_layer(*args: Any) -> Any:
    return (*_lstm(args[:7], args[7], args[12]), jnp.zeros((0,), jnp.uint8))


@rule("mkldnn_rnn_layer_backward")
def _rnn_layer_backward(*args: Any) -> Any:
    cotangents, reverse, has_biases = args[10:13], args[13], args[17]
    out, pull = jax.vjp(lambda *ts: _lstm(ts, reverse, has_biases), *args[:7])
    return pull(tuple(jnp.zeros_like(o) if g is None else g for o, g in zip(out, cotangents)))
