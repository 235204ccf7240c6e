"""Recurrent layers: the fused LSTM that torch's decomposition ends in, as a scan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._lowering._linalg import matmul
from functx.compat._lowering._table import rule


def _lstm(tensors: Any, reverse: bool) -> Any:
    """One layer in one direction: ``x`` is (time, batch, features)."""
    x, w, u, b, c, hx, cx = tensors
    inputs = matmul(x, w.T) + b + c

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


def _biased(tensors: Any, has_biases: bool) -> Any:
    x, w, u, *biases, hx, cx = tensors
    return (x, w, u, *(biases if has_biases else (0, 0)), hx, cx)


@rule("mkldnn_rnn_layer")
def _rnn_layer(*args: Any) -> Any:
    return (*_lstm(_biased(args[:7], args[12]), args[7]), jnp.zeros((0,), jnp.uint8))


@rule("mkldnn_rnn_layer_backward")
def _rnn_layer_backward(*args: Any) -> Any:
    cotangents, reverse, has_biases = args[10:13], args[13], args[17]
    out, pull = jax.vjp(lambda *ts: _lstm(_biased(ts, has_biases), reverse), *args[:7])
    return pull(tuple(jnp.zeros_like(o) if g is None else g for o, g in zip(out, cotangents)))
