"""Arithmetic rounded as XLA's compiler rounds it, where the last bit is to agree.

XLA contracts a product and a sum of float32 or float64 into one fused multiply-add, where torch
rounds twice, and divides by a constant by multiplying with its reciprocal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_lowering = ContextVar("lowering", default=False)
_SPLIT = 2.0**27 + 1


@contextmanager
def lowering() -> Iterator[None]:
    """While a function is traced to be lowered to JAX: XLA will do the contraction itself."""
    token = _lowering.set(True)
    try:
        yield
    finally:
        _lowering.reset(token)


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c``, in float32 and float64 with one rounding."""
    product = a * b
    if _lowering.get() or a.dtype not in (torch.float32, torch.float64):
        return product + c
    if a.dtype == torch.float32:  # a product of two is exact in float64
        return (a.double() * b.double() + c.double()).float()
    # What rounding took from the product (Dekker, Numerische Mathematik 18, 1971) and the sum.
    a_high, b_high = _high(a), _high(b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total = product + c
    other = total - product
    return total + ((product - (total - other)) + (c - other) + error)


def _high(x: torch.Tensor) -> torch.Tensor:
    scaled = x * _SPLIT
    return scaled - (scaled - x)


def divide(x: torch.Tensor, by: float) -> torch.Tensor:
    """``x / by`` by a product with the reciprocal; in bfloat16 that of float32."""
    divisor = torch.full((), by, dtype=x.dtype, device=x.device)
    if x.dtype == torch.bfloat16:
        return (x.float() * divisor.float().reciprocal()).to(x.dtype)
    return x * divisor.reciprocal()
