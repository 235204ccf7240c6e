"""Threefry 2x32, the counter-based generator behind JAX's keys, in torch operations.

Invariant: each function gives the bits that JAX gives with its default settings
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

import torch

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift ``int32`` words right, filling with zeros."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _rotate_left(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x << by) | _shift_right(x, 32 - by)


def threefry2x32(
    key: tuple[torch.Tensor, torch.Tensor], high: torch.Tensor, low: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hash pairs of words under a pair of key words; all ``int32``, broadcast together."""
    ks = (*key, key[0] ^ key[1] ^ _PARITY)
    a, b = high + ks[0], low + ks[1]
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            a = a + b
            b = _rotate_left(b, by) ^ a
        a = a + ks[(i + 1) % 3]
        b = b + (ks[(i + 2) % 3] + (i + 1))
    return a, b


def words(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two words of a key as ``int32``."""
    first, second = key.to(torch.int32).unbind(-1)
    return first, second


def key_of(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys from their ``int32`` words, in the dtype that keys are held in."""
    pair = torch.stack([first, second], -1)
    # A mask would do for int64, but not where JAX has no int64 for it.
    return pair.to(torch.uint32).to(dtype) if dtype == torch.int64 else pair.to(dtype)


def random_words(key: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two independent random words for each position of ``shape``, as ``int32``.

    Args:
        key: one key, shape ``(2,)``.
        shape: of the draw.

    Returns:
        Tensors of that shape, on the key's device.
    """
    pair = words(key)
    size = math.prod(shape)
    if size <= 1 << 31:
        low = torch.arange(size, dtype=torch.int32, device=key.device)
        high = torch.zeros((), dtype=torch.int32, device=key.device)
    else:
        counter = torch.arange(size, dtype=torch.int64, device=key.device)
        high, low = (counter >> 32).to(torch.int32), counter.to(torch.int32)
    a, b = threefry2x32(pair, high, low)
    return a.reshape(shape), b.reshape(shape)


def random_word(key: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """One random word for each position of ``shape``, as ``int32``."""
    a, b = random_words(key, shape)
    return a ^ b


def random_long(key: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """64 random bits for each position of ``shape``, as ``int64``."""
    high, low = random_words(key, shape)
    return (high.to(torch.int64) << 32) | (low.to(torch.int64) & _WORD)
