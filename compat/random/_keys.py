"""Make and split random keys, exchange them with JAX, and generate random bits from them.

Invariant: a key is two 32-bit words in the last axis of an integer tensor. Only the low 32 bits of
an entry count, for any dtype. Each function returns the bits that JAX returns by default
(``threefry2x32``, ``jax_threefry_partitionable=True``): the number at row-major position ``i`` of a
draw is the hash of ``i`` under the key, so that it does not depend on the shape.  Counters are
64-bit, two words of 32.

The arithmetic is that of unsigned 32-bit words, done in ``int32``, whose sums and left shifts wrap
alike: torch has hardly any operation for ``uint32``, its compiler does not vectorize a loop that
holds one, and ``int64`` would need masks.  Only the right shift differs, and is masked.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.int64, torch.int32, torch.uint32)
_WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift ``int32`` words right, filling with zeros."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def threefry2x32(key: tuple[Tensor, Tensor], high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Hash pairs of words under a pair of key words; all ``int32``, broadcast together."""
    ks = (*key, key[0] ^ key[1] ^ _PARITY)
    a, b = high + ks[0], low + ks[1]
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            a = a + b
            b = ((b << by) | _shift_right(b, 32 - by)) ^ a
        a = a + ks[(i + 1) % 3]
        b = b + (ks[(i + 2) % 3] + (i + 1))
    return a, b


def words(key: Tensor) -> tuple[Tensor, Tensor]:
    """The two words of a key as ``int32``."""
    first, second = key.to(torch.int32).unbind(-1)
    return first, second


def key_of(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys from their ``int32`` words, in the dtype that keys are held in."""
    pair = torch.stack([first, second], -1)
    # A mask would do for int64, but not where JAX has no int64 for it.
    return pair.to(torch.uint32).to(dtype) if dtype == torch.int64 else pair.to(dtype)


def random_words(key: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Two independent random words for each position of ``shape``, as ``int32``."""
    size = math.prod(shape)
    if size <= 1 << 31:
        low = torch.arange(size, dtype=torch.int32, device=key.device)
        high = torch.zeros((), dtype=torch.int32, device=key.device)
    else:
        counter = torch.arange(size, dtype=torch.int64, device=key.device)
        high, low = (counter >> 32).to(torch.int32), counter.to(torch.int32)
    a, b = threefry2x32(words(key), high, low)
    return a.reshape(shape), b.reshape(shape)


def random_word(key: Tensor, shape: Sequence[int]) -> Tensor:
    """One random word for each position of ``shape``, as ``int32``."""
    a, b = random_words(key, shape)
    return a ^ b


def random_long(key: Tensor, shape: Sequence[int]) -> Tensor:
    """64 random bits for each position of ``shape``, as ``int64``."""
    high, low = random_words(key, shape)
    return (high.to(torch.int64) << 32) | (low.to(torch.int64) & _WORD)


def key(seed: int | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """A key from a seed, as ``jax.random.key``.

    JAX takes a seed outside ``[0, 2**31)`` differently with and without 64-bit types; this function
    does what it does with them, and keeps all 64 bits.

    Args:
        seed: an integer of at most 64 bits, or an integer tensor of shape ``()`` (``vmap`` over
            seeds gives a batch of keys).
        device: the device of the key, and of draws from it; by default that of a tensor ``seed``.

    Returns:
        ``int64`` tensor of shape ``(2,)``.

    Raises:
        TypeError: the seed is not an integer, or not a scalar.
        OverflowError: it needs more than 64 bits.

    Example:
        >>> from functx.compat import random
        >>> random.key(42)
        tensor([ 0, 42])
    """
    if isinstance(seed, Tensor):
        _check_scalar("key", seed, "seeds")
        low = seed.to(torch.int64) if device is None else seed.to(device, torch.int64)
        high = low >> 32 if seed.dtype.itemsize == 8 else torch.zeros_like(low)
        return key_of(high.to(torch.int32), low.to(torch.int32), torch.int64)
    seed = as_integer(seed)
    if isinstance(seed, bool) or not isinstance(seed, int | torch.SymInt):
        raise TypeError(f"random.key takes an integer seed, not {type(seed).__name__}")
    if not -(1 << 63) <= seed < 1 << 64:
        raise OverflowError(f"random.key: the seed {seed} needs more than 64 bits")
    return torch.tensor([(seed >> 32) & _WORD, seed & _WORD], device=device)


PRNGKey = key


def split(key: Tensor, num: int | Sequence[int] = 2) -> Tensor:
    """New keys from one, as ``jax.random.split``.

    Args:
        key: a key, shape ``(2,)``; it should not be used again.
        num: the number of keys, or the shape of the array of keys.

    Returns:
        Keys of shape ``(num, 2)`` or ``(*num, 2)``, in the key's dtype.

    Raises:
        TypeError: ``key`` is not a key.
        ValueError: it is an array of keys.

    Example:
        >>> from functx.compat import random
        >>> random.split(random.key(0), 3).shape
        torch.Size([3, 2])
    """
    check_key("split", key)
    sizes: Any = (num,) if isinstance(num, Integral | torch.SymInt) else num
    return key_of(*random_words(key, check_shape("split", sizes)), key.dtype)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and an integer, as ``jax.random.fold_in``.

    Args:
        key: a key, shape ``(2,)``.
        data: an integer in ``[0, 2**32)``, or an integer tensor of shape ``()``, whose low 32 bits
            are used. If ``vmap`` maps it, each example gets a different key.

    Returns:
        A key, shape ``(2,)``, in the key's dtype.

    Raises:
        TypeError: ``key`` is not a key, or ``data`` is not an integer scalar.
        ValueError: ``key`` is an array of keys.
        OverflowError: ``data`` is a Python integer outside ``[0, 2**32)``.

    Example:
        >>> import torch
        >>> from functx.compat import random
        >>> layers = torch.vmap(random.fold_in, (None, 0))(random.key(0), torch.arange(4))
        >>> layers.shape
        torch.Size([4, 2])
    """
    check_key("fold_in", key)
    data = as_integer(data)
    if isinstance(data, Tensor):
        _check_scalar("fold_in", data, "integers")
        low = data.to(key.device, torch.int32)
    elif not isinstance(data, int | torch.SymInt):
        raise TypeError(f"random.fold_in takes an integer, not {type(data).__name__}")
    elif not 0 <= data <= _WORD:
        raise OverflowError(f"random.fold_in: {data} is outside [0, 2**32)")
    else:
        signed = data - (1 << 32) if data > _WORD >> 1 else data
        low = torch.full((), signed, dtype=torch.int32, device=key.device)
    return key_of(*threefry2x32(words(key), torch.zeros_like(low), low), key.dtype)


def key_data(key: Tensor) -> Tensor:
    """The words of keys as ``uint32``, as ``jax.random.key_data`` gives them.

    Args:
        key: keys, shape ``(..., 2)``.

    Returns:
        ``uint32`` tensor of the same shape.

    Raises:
        TypeError: ``key`` is not a tensor of keys.
    """
    check_key("key_data", key, batched=True)
    return key.to(torch.uint32)


def wrap_key_data(data: Any) -> Tensor:
    """Keys from their words, as ``jax.random.wrap_key_data``.

    Args:
        data: integers of shape ``(..., 2)``: a tensor, or a NumPy array.

    Returns:
        ``int64`` tensor of the same shape.

    Raises:
        TypeError: the last axis does not have two integers.

    Example:
        >>> import torch
        >>> from functx.compat import random
        >>> words = torch.tensor([7, 4294967295], dtype=torch.uint32)
        >>> random.wrap_key_data(words)
        tensor([         7, 4294967295])
    """
    keys = data if isinstance(data, Tensor) else torch.tensor(data)
    check_key("wrap_key_data", keys, batched=True)
    return keys.to(torch.int64) & _WORD


def from_jax(key: Any) -> Tensor:
    """Keys of JAX as keys of this module.

    Args:
        key: ``jax.random.key(...)`` or ``jax.random.PRNGKey(...)``, or an array of them.

    Returns:
        ``int64`` tensor, on the CPU, of the keys' shape and ``(2,)``.

    Raises:
        TypeError: the generator is not ``threefry2x32``.

    Example:
        >>> import jax
        >>> from functx.compat import random
        >>> random.from_jax(jax.random.key(3))
        tensor([0, 3])
    """
    import numpy as np

    return wrap_key_data(np.asarray(words_of_jax(key, "this")))


def words_of_jax(key: Any, what: str) -> Any:
    """The words of JAX's keys, in JAX. ``what`` is their name in the error for other generators."""
    import jax

    kind = str(jax.random.key_impl(key))
    if kind != "threefry2x32":
        raise TypeError(
            f"{what} is a key of {kind}; only threefry2x32 has a counterpart in torch: make it with"
            " jax.random.key(seed, impl='threefry2x32')"
        )
    return jax.random.key_data(key)


def to_jax(key: Tensor) -> Any:
    """Keys of this module as typed keys of JAX.

    Args:
        key: keys, shape ``(..., 2)``.

    Returns:
        A JAX array of keys, shape ``(...)``.

    Raises:
        TypeError: ``key`` is not a tensor of keys.
        ImportError: JAX is not installed.

    Example:
        >>> from functx.compat import random
        >>> random.to_jax(random.key(3))
        Array((), dtype=key<fry>) overlaying:
        [0 3]
    """
    from functx.compat import _jax

    _jax.require("random.to_jax")
    import jax
    import jax.numpy as jnp

    data = jnp.asarray(key_data(key).cpu().numpy())
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _check_scalar(name: str, x: Tensor, what: str) -> None:
    if x.ndim or x.is_floating_point() or x.is_complex():
        raise TypeError(
            f"random.{name} takes one integer, got a tensor of shape {tuple(x.shape)} and dtype"
            f" {x.dtype}; use vmap for many {what}"
        )


def check_key(name: str, key: Any, batched: bool = False) -> None:
    """Raise an error if ``key`` is not a key, or is an array of keys."""
    if not isinstance(key, Tensor):
        raise TypeError(
            f"random.{name} takes a key first, not a {type(key).__name__}: make one with"
            " functx.compat.random.key(seed), or convert a JAX key with"
            " functx.compat.random.from_jax"
        )
    if key.dtype not in _DTYPES or not key.ndim or key.shape[-1] != 2:
        raise TypeError(
            f"random.{name} takes a key, two integer words in the last axis (int64, int32 or"
            f" uint32), not a tensor of shape {tuple(key.shape)} and dtype {key.dtype}: make one"
            " with functx.compat.random.key(seed)"
        )
    if key.ndim > 1 and not batched:
        raise ValueError(
            f"random.{name} takes a single key, but got an array of keys of shape"
            f" {tuple(key.shape[:-1])}: use vmap"
        )


def as_integer(x: Any) -> Any:
    """Convert an integer of NumPy to one of Python; return other values unchanged."""
    return int(x) if isinstance(x, Integral) and not isinstance(x, bool) else x


def check_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of ints. Raises an error for a single number and for negative sizes."""
    # A NumPy array with one axis is not a Sequence, but JAX accepts it as a shape.
    is_array = hasattr(shape, "__array__") and getattr(shape, "ndim", 0) == 1
    if not is_array and (not isinstance(shape, Sequence) or isinstance(shape, str)):
        raise TypeError(
            f"random.{name}: a shape is a sequence of sizes such as (3,), not {shape!r}"
        )
    if any(not isinstance(size, Integral | torch.SymInt) for size in shape):
        raise TypeError(f"random.{name}: {shape!r} has a size that is not an integer")
    if any(size < 0 for size in shape):
        raise ValueError(f"random.{name}: {shape!r} has a negative size")
    return tuple(size if isinstance(size, torch.SymInt) else int(size) for size in shape)


def check_broadcast(name: str, shape: tuple[int, ...], *parameters: Sequence[int]) -> None:
    """Raise an error if parameters do not broadcast to the shape of the draw."""
    try:
        fits = torch.broadcast_shapes(shape, *map(tuple, parameters)) == tuple(shape)
    except RuntimeError:
        fits = False
    if not fits:
        got = ", ".join(str(tuple(p)) for p in parameters)
        raise ValueError(
            f"random.{name}: parameters of shape {got} don't broadcast to the requested shape"
            f" {shape}, which has {math.prod(shape)} numbers"
        )
