"""Dtypes in the two frameworks, and 64-bit types when JAX has them off.

Invariant: nothing is narrowed silently. With x64 off, JAX's default integer is ``int32``. So an
``int32`` array is traced as torch's default ``int64`` (labels and indices work as in torch) and is
returned as ``int32``; concrete ``int64`` values must fit. ``float64`` and ``complex128`` are errors
in this case, because JAX would silently compute with less precision.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from functx._core import LoweringError
from functx.compat._jax import x64_enabled

_NAMES = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64
complex128 float8_e4m3fn float8_e5m2
"""
_TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_JAX = {dtype: np.dtype(getattr(jnp, name)) for name, dtype in _TORCH.items()}
_NARROW = {
    torch.int64: torch.int32,
    torch.uint64: torch.uint32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}
WIDE_FLOATS = (torch.float64, torch.complex128)
WIDE_INTEGERS = (torch.int64, torch.uint64)
ENABLE_X64 = "turn 64-bit types on by `with jax.enable_x64(True):` or the flag JAX_ENABLE_X64=1"


def to_jax_dtype(dtype: torch.dtype) -> Any:
    """The JAX dtype for a torch dtype under the current settings (64 bits only if x64 is on).

    Raises a ``LoweringError`` if JAX has no such dtype.
    """
    if not x64_enabled():
        dtype = _NARROW.get(dtype, dtype)
    try:
        return _JAX[dtype]
    except KeyError:
        raise LoweringError(f"JAX does not have the dtype {dtype}") from None


def has_torch_dtype(dtype: Any) -> bool:
    """Whether torch has this JAX dtype. It lacks, for example, typed keys and 4-bit integers."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and np.dtype(dtype).name in _TORCH


def torch_dtype_of(dtype: Any) -> torch.dtype:
    """The torch dtype of the same name."""
    return _TORCH[np.dtype(dtype).name]


def to_torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype with which a JAX array is traced.

    Raises a ``LoweringError`` if torch has no such dtype.
    """
    if not has_torch_dtype(dtype):
        raise LoweringError(f"torch does not have the JAX dtype {dtype}")
    out = torch_dtype_of(dtype)
    return torch.int64 if out is torch.int32 and not x64_enabled() else out


def check_fits(values: np.ndarray[Any, Any], what: str) -> None:
    """Raise an error for values that JAX would narrow: 64-bit floats, integers beyond 32 bits.

    ``what`` is the name of the values in the message.
    """
    if x64_enabled():
        return
    if values.dtype in (np.float64, np.complex128):
        raise LoweringError(
            f"{what} is {values.dtype}, which JAX would narrow silently; {ENABLE_X64}, or convert"
            " it to float32 first"
        )
    if values.dtype in (np.int64, np.uint64) and values.size:
        info = np.iinfo(np.int32 if values.dtype == np.int64 else np.uint32)
        low, high = values.min(), values.max()
        if low < info.min or high > info.max:
            raise LoweringError(
                f"{what} is {values.dtype} with values in [{low}, {high}], which do not fit"
                f" {info.dtype}; {ENABLE_X64}"
            )
