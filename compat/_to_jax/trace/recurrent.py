"""Dropout between the layers of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``.

torch's own decomposition of these operations leaves it out (it compares the number of layers the
wrong way round), so a traced network would silently train without it.  A call with dropout is made
layer by layer instead, with the dropout in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import dropout

_LAYERED = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _take_apart(args: Sequence[Any]) -> tuple[int, int, float, bool, bool]:
    """Where the states are among the arguments; layers, dropout, whether it trains, both ways."""
    # Of a packed sequence the batch sizes come before the states, and those before the parameters.
    at = 2 if isinstance(args[3], list) else 1
    layers, p, train, both_ways = args[at + 3 : at + 7]
    return at, layers, p, train, both_ways


def drops_between_layers(func: Any, args: Sequence[Any]) -> bool:
    """Whether this is the call of a recurrent network with dropout between its layers."""
    if func not in _LAYERED:
        return False
    _, layers, p, train, _ = _take_apart(args)
    return bool(train and p > 0 and layers > 1)


def layer_by_layer(func: Callable[..., Any], args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The result of such a call."""
    at, layers, p, train, both_ways = _take_apart(args)
    x, states, params, has_biases = args[0], args[at], args[at + 1], args[at + 2]
    ways = 2 if both_ways else 1
    each = len(params) // layers
    finals = []
    for i in range(layers):
        x = dropout(x, p) if i else x
        rows = slice(i * ways, (i + 1) * ways)
        state = states[rows] if torch.is_tensor(states) else [s[rows] for s in states]
        own = list(params[i * each : (i + 1) * each])
        settings = (state, own, has_biases, 1, 0.0, train, both_ways)
        x, *final = func(x, *args[1:at], *settings, *args[at + 7 :])
        finals.append(final)
    return (x, *(torch.cat(parts) for parts in zip(*finals)))
