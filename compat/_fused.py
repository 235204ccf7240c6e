"""Arithmetic rounded as XLA's compiler rounds it, where the last bit is to agree.

XLA contracts a product and a sum of float32 or float64 into one fused multiply-add, on CPU and on
GPU, where torch rounds twice; so it does with float16 on a CPU that computes in float16.  On
others, and in bfloat16, half precision is rounded twice by both; float16 on a GPU is taken to be,
and was not measured.  And it divides by a constant by multiplying with its reciprocal, in bfloat16
with that of float32.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _State(threading.local):
    lowering = False


_state = _State()
_SPLIT = 2.0**27 + 1
_OF_CPU = torch.cpu.get_capabilities()
# The second, of ARM, by LLVM's rules alone: not measured.
_CPU_HAS_FLOAT16 = any(_OF_CPU.get(name, False) for name in ("avx512_fp16", "fp16_arith"))


@contextmanager
def lowering() -> Iterator[None]:
    """While a function is traced to be lowered to JAX: XLA will do the contraction itself."""
    before, _state.lowering = _state.lowering, True
    try:
        yield
    finally:
        _state.lowering = before


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` with one rounding, or two where XLA rounds twice."""
    if _state.lowering or not _rounded_once(a):
        return a * b + c
    if a.dtype != torch.float64:  # a product of two is exact in float64
        return (a.double() * b.double() + c.double()).to(a.dtype)
    product = a * b
    error = _product_error(a, b, product)
    total = product + c
    other = total - product
    lost = (product - (total - other)) + (c - other)
    return total + (lost + error)


def _rounded_once(x: torch.Tensor) -> bool:
    if x.dtype == torch.float16:
        return _CPU_HAS_FLOAT16 and x.device.type == "cpu"
    return x.dtype in (torch.float32, torch.float64)


def _product_error(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """What rounding took from a product (Dekker, Numerische Mathematik 18, 1971)."""
    a_high, b_high = _high(a), _high(b)
    a_low, b_low = a - a_high, b - b_high
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _high(x: torch.Tensor) -> torch.Tensor:
    scaled = x * _SPLIT
    return scaled - (scaled - x)


def divide(x: torch.Tensor, by: float) -> torch.Tensor:
    """``x / by`` as XLA does it: a product with the reciprocal, both in the dtype of ``x``."""
    if x.dtype in _FORMATS:
        by = _rounded(by, _FORMATS[x.dtype])
        return x * (_rounded(1.0 / by, _FORMATS[x.dtype]) if by else math.inf)
    if x.dtype == torch.bfloat16:  # a bfloat16 is the upper half of a float32
        (word,) = struct.unpack("<I", struct.pack("<f", by))
        word += 0x7FFF + (word >> 16 & 1)
        (by,) = struct.unpack("<f", struct.pack("<I", word & 0xFFFF0000))
    return x / by


_FORMATS = {torch.float16: "<e", torch.float32: "<f", torch.float64: "<d"}


def _rounded(x: float, form: str) -> float:
    try:
        return float(struct.unpack(form, struct.pack(form, x))[0])
    except OverflowError:
        return math.inf
