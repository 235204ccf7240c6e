"""What a function made by ``from_jax`` may be called with, one leaf at a time.

Everything that JAX would trace travels as a tensor; everything else is static.
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

# What numbers travel as with 64-bit types off and on: all that JAX takes of them.
_SCALARS: dict[type, tuple[torch.dtype, torch.dtype]] = {
    bool: (torch.bool, torch.bool),
    int: (torch.int32, torch.int64),
    float: (torch.float32, torch.float64),
    complex: (torch.complex64, torch.complex128),
}
_SYMBOLS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclass(frozen=True)
class Leaf:
    """What is known of one leaf of the arguments, its values aside."""

    key: Hashable  # its part of the signature; of what JAX does not trace the leaf, as `Static`
    decode: Callable[[Any], Any] | None = None  # makes it from the array that travelled

    def value(self, arrays: Iterator[Any]) -> Any:
        """What the function is given; takes the next of the arrays that travelled."""
        if isinstance(self.key, Static):
            return self.key.value
        return next(arrays) if self.decode is None else self.decode(next(arrays))


def read_leaf(
    x: Any, device: torch.device | None, name: str, x64: bool
) -> tuple[Leaf, Tensor | None]:
    """What one leaf of the arguments of function ``name`` is, and its values if JAX traces it.

    Numbers and arrays go to ``device``.  What JAX can't take, or would narrow, is refused.
    """
    if isinstance(x, Tensor):
        if x.device != device:
            raise ValueError(
                f"from_jax: {name} got tensors on {device} and on {x.device}; move them to one"
                " device"
            )
        if x.is_nested:
            raise LoweringError(
                f"from_jax: {name} got a nested tensor, which JAX has no arrays for; pad it with"
                " torch.nested.to_padded_tensor"
            )
        # A shape in plain numbers: each is a signature of its own, also while torch traces.
        return Leaf((tuple(map(int, x.shape)), x.dtype)), x
    if isinstance(x, (np.ndarray, np.generic)):
        check_fits(np.asarray(x), f"from_jax: an argument of {name}")
        x = jnp.asarray(x)
    elif not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"from_jax: {name} got torch tensors and a value that JAX is tracing; inside JAX's"
            " transforms call it with JAX arrays alone"
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
            f"from_jax: {name} got a {type(x).__name__}, which is neither an array nor hashable;"
            " register it as a JAX pytree, or make it hashable to pass it as a static value"
        ) from None
    return Leaf(x if isinstance(x, Static) else Static(type(x), x)), None


def _as_tensor(x: Any, dtype: torch.dtype, device: torch.device | None, name: str) -> Tensor:
    if isinstance(x, int) and not isinstance(x, bool):
        limits = torch.iinfo(dtype)
        if not limits.min <= x <= limits.max:
            raise OverflowError(
                f"from_jax: {name} got the number {x}, which is too large for {dtype}; with 64-bit"
                " types on (from_jax(..., enable_x64=True)) it may fit"
            )
    return torch.tensor(x, dtype=dtype, device=device)


@dataclass(frozen=True)
class Static:
    """A static argument: no pytree, and so one leaf of the arguments; ``True`` is not 1."""

    kind: type
    value: Any


def mark_static(
    names: tuple[tuple[int, ...], tuple[str, ...]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with those that ``jax.jit`` would take for static as `Static`.

    ``names`` are positions, negative ones from the end, and keywords.  What they name has to be
    hashable, or is a ``ValueError``.
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
            " hashable; pass a tuple in place of a list, or leave it out of static_argnums and"
            " static_argnames"
        ) from None
    return Static(type(value), value)
