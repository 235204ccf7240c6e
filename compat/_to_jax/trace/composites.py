"""Replacements for functions of torch that can't be traced as they are.

Some read values, to raise an error for invalid ones. And torch's decomposition of recurrent
networks leaves out the dropout between layers, so a network with dropout is run layer by layer,
with the dropout in between.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from functx import _torch as engine
from functx._core import LoweringError, tree
from functx._torch.lowering import FakeTensor, grouped_mm


def _cov(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """``torch.cov``, which in torch reads values to check that there are enough observations."""
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    factors = [w for w in (fweights, aweights) if w is not None]
    weights = functools.reduce(torch.mul, factors) if factors else torch.ones_like(rows[0].real)
    total = weights.sum()
    mean = (rows * weights).sum(1, keepdim=True) / total
    away = rows - mean
    less = correction * (1 if aweights is None else (weights * aweights).sum() / total)
    norm = (total - less).clamp(min=0)
    return (away @ (away * weights).mH / norm).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    c = _cov(x)
    if c.ndim == 0:
        return c / c
    scale = c.diagonal().sqrt()
    c = c / scale[:, None] / scale[None]
    if not c.is_complex():
        return c.clip(-1, 1)
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1))


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """``gaussian_nll_loss``, which in torch reads values to check for negative variances."""
    spread = torch.as_tensor(var, dtype=input.dtype).clone()
    if spread.ndim and spread.shape == input.shape[:-1]:
        spread = spread.unsqueeze(-1)
    with torch.no_grad():
        spread.clamp_(min=eps)
    loss = 0.5 * (spread.log() + (input - target) ** 2 / spread)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else getattr(torch, reduction)(loss)


def _ctc_loss(*_: Any, **__: Any) -> Tensor:
    raise LoweringError(
        "ctc_loss allocates a buffer whose shape depends on the values of the target lengths, which"
        " JAX can't do. Use optax.ctc_loss in the JAX function"
    )


def stacked(data: Any) -> Any:
    """Stack nested lists of tensors. ``torch.tensor`` would read their values instead.

    Other data are returned unchanged, and so are lists with a tensor that the tracer does not know,
    for example one from inside a region.
    """
    listed = tree.leaves(data) if isinstance(data, list | tuple) else ()
    tensors = [t for t in listed if torch.is_tensor(t)]
    of = engine.proxy_mode().tracer.unwrap_proxy
    if not tensors or any(isinstance(t, FakeTensor) and of(t) is t for t in tensors):
        return data
    with torch.no_grad():
        return torch.stack([torch.as_tensor(stacked(part)) for part in data])


def _grouped_mm(x: Tensor, weights: Tensor, offs: Any = None, **options: Any) -> Tensor:
    """Multiply each row by the matrix of its group (in a trace, torch's takes only bfloat16)."""
    if x.ndim != 2 or weights.ndim != 3 or any(v is not None for v in options.values()):
        return grouped_mm(x, weights, offs, **options)
    # One product with zeros for all other groups, since JAX's ragged_dot has no rule for vmap.
    before = (torch.arange(len(x), device=x.device)[:, None] < offs).int()
    member = before.diff(dim=1, prepend=before[:, :1] * 0)[..., None]
    with torch.autocast(x.device.type, enabled=False):
        return torch.where(member > 0, x[:, None], 0).flatten(1) @ weights.flatten(0, 1)


RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def layer_by_layer(func: Callable[..., Any], *args: Any) -> tuple[Tensor, ...]:
    """Run a recurrent network layer by layer, with dropout in between."""
    # With a packed sequence, the batch sizes are the second argument, before the states.
    at = 2 if isinstance(args[3], list) else 1
    x, states, params, has_biases, layers, p, train, both_ways = args[0], *args[at : at + 7]
    if not (train and p > 0 and layers > 1):
        return func(*args)
    ways = 2 if both_ways else 1
    each = len(params) // layers
    finals = []
    for i in range(layers):
        x = functional.dropout(x, p) if i else x
        rows = slice(i * ways, (i + 1) * ways)
        state = states[rows] if torch.is_tensor(states) else [s[rows] for s in states]
        own = list(params[i * each : (i + 1) * each])
        settings = (state, own, has_biases, 1, 0.0, train, both_ways)
        x, *final = func(x, *args[1:at], *settings, *args[at + 7 :])
        finals.append(final)
    return (x, *(torch.cat(parts) for parts in zip(*finals)))


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    functional.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
    grouped_mm: _grouped_mm,
}
