"""Arrays of JAX dtypes that torch lacks, as arrays of dtypes that it has.

Typed random keys travel as the integers they are made of, 4-bit integers as 8-bit ones, and floats
of one byte that torch has no name for as their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2"),
)
_TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}


def has_torch_dtype(dtype: Any) -> bool:
    """Whether torch has this JAX dtype."""
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and np.dtype(dtype).name in _TORCH


def torch_dtype_of(dtype: Any) -> torch.dtype:
    """The torch dtype of the same name."""
    return _TORCH[np.dtype(dtype).name]


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of typed random keys."""
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def encode(x: Any) -> Any:
    """An array that torch can hold."""
    if is_key(x):
        return jax.random.key_data(x)
    if has_torch_dtype(x.dtype):
        return x
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint8)
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def decoder(x: Any) -> Callable[[Any], Any] | None:
    """What makes ``x`` from its encoding; ``None`` where that is itself."""
    if is_key(x):
        impl = jax.random.key_impl(x)
        return lambda data: jax.random.wrap_key_data(data, impl=impl)
    dtype = x.dtype
    if has_torch_dtype(dtype):
        return None
    if jnp.issubdtype(dtype, jnp.integer):
        return lambda data: data.astype(dtype)
    return lambda data: jax.lax.bitcast_convert_type(data, dtype)
