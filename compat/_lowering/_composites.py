"""Python functions of torch as a trace has to see them.

A torch-function mode is shown ``torch.nn.functional.gumbel_softmax`` as one call, and nothing of
what it does inside: a ``detach`` there would be taken for one that autograd makes.  ``opened`` is
the same function without the check that hands it to modes, so that what it calls is shown.

``REPLACED`` are functions that look at values: to refuse some, or to loop as often as they say.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from functx._errors import LoweringError

# Those of torch that detach.
_DETACHING = {functional.gumbel_softmax}
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _never(*_: Any) -> bool:
    return False


@functools.cache
def opened(func: Any) -> Callable[..., Any] | None:
    """A function that detaches and would hand itself to modes, without doing so; else None."""
    if func not in _DETACHING:
        return None
    names = {**func.__globals__, **dict.fromkeys(_CHECKS, _never)}
    same = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    same.__kwdefaults__ = func.__kwdefaults__
    return same


def _cov(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """``torch.cov``, which asks whether there are enough observations."""
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    given = [w for w in (fweights, aweights) if w is not None]
    weights = functools.reduce(torch.mul, given) if given else torch.ones_like(rows[0].real)
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
    """``gaussian_nll_loss``, which asks whether a variance is negative."""
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
        "ctc_loss keeps a buffer whose shape depends on values, the lengths of the targets: use"
        " optax.ctc_loss in the JAX function"
    )


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    functional.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
}
