"""Backward passes that count, for random programs."""

from __future__ import annotations

from typing import Any

import torch


class Counter:
    """Counts as an attribute."""

    n = 1.0


def one_more(state: Any) -> float:
    """Count in a list, a dict, or an object; how many there are."""
    if isinstance(state, Counter):
        state.n += 1
        return state.n
    place: Any = 0 if isinstance(state, list) else "k"
    state[place] += 1
    return float(state[place])


def count(state: Any) -> float:
    """How many there are."""
    if isinstance(state, Counter):
        return state.n
    return float(state[0 if isinstance(state, list) else "k"])


class Counts(torch.autograd.Function):
    """Counts its backward passes in what it is given."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, state: Any) -> torch.Tensor:
        ctx.state = state
        return t.sin()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return cotangent * one_more(ctx.state), None
