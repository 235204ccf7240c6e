"""Convert the leaves of the arguments of a function made by ``from_jax``.

A leaf that JAX would trace is passed as a tensor; all other leaves are static.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from functx._core import LoweringError
from functx.compat._bridge import check_fits, decoder, encode, is_key, tensor_from_jax
from functx.compat._jax import weakly_typed

# The dtypes of Python numbers in JAX, with 64-bit types off and on.
_SCALARS: dict[type, tuple[torch.dtype, torch.dtype]] = {
    bool: (torch.bool, torch.bool),
    int: (torch.int32, torch.int64),
    float: (torch.float32, torch.float64),
    complex: (torch.complex64, torch.complex128),
}
_SYMBOLS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclass(frozen=True)
class Leaf:
    """One leaf of the arguments, without its values."""

    key: Hashable  # its part of the signature; a `Static` if JAX does not trace it
    decode: Callable[[Any], Any] | None = None  # makes the leaf from the array that was passed

    def value(self, arrays: Iterator[Any]) -> Any:
        """The leaf for the JAX function; unless it is static, it consumes one of ``arrays``."""
        if isinstance(self.key, Static):
            return self.key.value
        return next(arrays) if self.decode is None else self.decode(next(arrays))


def read_leaf(
    x: Any, device: torch.device | None, name: str, x64: bool
) -> tuple[Leaf, Tensor | None]:
    """One leaf of the arguments of function ``name``, and a tensor of its values if it is traced.

    Numbers and arrays are moved to ``device``. Raises an error for a leaf that JAX does not accept,
    or that it would narrow.
    """
    if isinstance(x, Tensor):
        if x.device != device:
            raise ValueError(
                f"from_jax: {name} got tensors on {device} and on {x.device}; move all of them to"
                " one device"
            )
        if x.is_nested:
            raise LoweringError(
                f"from_jax: {name} got a nested tensor, which has no counterpart in JAX; pad it"
                " with torch.nested.to_padded_tensor"
            )
        # Symbolic sizes become numbers, since JAX needs a signature for each shape.
        return Leaf((tuple(map(int, x.shape)), x.dtype)), x
    if isinstance(x, (np.ndarray, np.generic)):
        check_fits(np.asarray(x), f"from_jax: an argument of {name}")
        x = jnp.asarray(x)
    elif not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"from_jax: {name} got torch tensors and a value that JAX is tracing. Inside JAX's"
            " transforms, call it with JAX arrays only"
        )
    if isinstance(x, jax.Array):
        if is_key(x) or not (x.weak_type and x.ndim == 0):
            return Leaf((x.shape, x.dtype), decode=decoder(x)), tensor_from_jax(encode(x), device)
        x = x.item()
    if type(x) in _SYMBOLS:
        x = _SYMBOLS[type(x)](x)
    for kind, dtypes in _SCALARS.items():
        if isinstance(x, kind):
            return Leaf(kind, decode=weakly_typed), _as_tensor(x, dtypes[x64], device, name)
    try:
        hash(x)
    except TypeError:
        raise TypeError(
            f"from_jax: {name} got a {type(x).__name__}, which is neither an array nor hashable."
            " Register it as a JAX pytree, or make it hashable to pass it as a static value"
        ) from None
    return Leaf(x if isinstance(x, Static) else Static(type(x), x)), None


def _as_tensor(x: Any, dtype: torch.dtype, device: torch.device | None, name: str) -> Tensor:
    if isinstance(x, int) and not isinstance(x, bool):
        limits = torch.iinfo(dtype)
        if not limits.min <= x <= limits.max:
            raise OverflowError(
                f"from_jax: {name} got the number {x}, which is too large for {dtype}; turn 64-bit"
                " types on by from_jax(..., enable_x64=True)"
            )
    return torch.tensor(x, dtype=dtype, device=device)


@dataclass(frozen=True)
class Static:
    """A static argument. It is one leaf, even if the value is a pytree; ``True`` differs from 1."""

    kind: type
    value: Any


def mark_static(
    names: tuple[tuple[int, ...], tuple[str, ...]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wrap the arguments of a call that are static for ``jax.jit`` in `Static`.

    ``names`` are positions (negative ones count from the end) and keywords. Raises a ``ValueError``
    if such an argument is not hashable.
    """
    argnums, argnames = names
    full = [*args]
    for i in {i % len(args) for i in argnums if -len(args) <= i < len(args)}:
        full[i] = _static(i, args[i])
    return tuple(full), {k: _static(k, v) if k in argnames else v for k, v in kwargs.items()}


def _static(where: int | str, value: Any) -> Static:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"from_jax: the static argument {where!r} is a {type(value).__name__}, which is not"
            " hashable. Pass a tuple instead of a list, or leave it out of static_argnums and"
            " static_argnames"
        ) from None
    return Static(type(value), value)
