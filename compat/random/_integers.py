"""Integers, permutations and categories from keys.

Remainders of unsigned words are worked out in signed arithmetic (Warren, Hacker's Delight, 9-3),
since torch has no remainder of ``uint32`` or ``uint64``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx.compat.random._draws import check_mode, gumbel
from functx.compat.random._keys import (
    as_integer,
    check_broadcast,
    check_key,
    check_shape,
    random_long,
    random_word,
    split,
)

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
Bound = int | Tensor


def randint(
    key: Tensor,
    shape: Sequence[int],
    minval: Bound,
    maxval: Bound,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Uniform integers in ``[minval, maxval)``, as ``jax.random.randint``.

    Args:
        key: a key, shape ``(2,)``.
        shape: the shape of the result.
        minval: the lower bound, an integer or an integer tensor that broadcasts to ``shape``.
        maxval: the upper bound; where it is not above ``minval`` the result is ``minval``.
        dtype: ``int8``, ``int16``, ``int32`` (the default), ``int64`` or ``uint8``.  Different
            integers are drawn in 32 and in 64 bits; JAX's default depends on its x64 flag.

    Returns:
        Integers of that shape and dtype.

    Raises:
        TypeError: the dtype or a bound is not integer.
        ValueError: a bound does not broadcast.

    Example:
        >>> from functx.compat import random
        >>> random.randint(random.key(0), (4,), 0, 10)
        tensor([9, 0, 2, 3], dtype=torch.int32)
    """
    check_key("randint", key)
    shape = check_shape("randint", shape)
    dtype = torch.int32 if dtype is None else dtype
    if dtype not in _INTEGERS:
        raise TypeError(f"random.randint returns int8, int16, int32, int64 or uint8, not {dtype}")
    minval, maxval = as_integer(minval), as_integer(maxval)
    for bound in (minval, maxval):
        kind = bound.dtype if isinstance(bound, Tensor) else type(bound)
        if kind not in (*_INTEGERS, int):
            raise TypeError(
                f"random.randint: bounds must be integers, got a {getattr(kind, '__name__', kind)}"
            )
        check_broadcast("randint", shape, getattr(bound, "shape", ()))
    wide = torch.int64 if dtype == torch.int64 else torch.int32
    limits, most = torch.iinfo(dtype), torch.iinfo(wide).max
    low = _clipped(minval, limits.min, limits.max, wide, key.device)
    high = _clipped(maxval, limits.min, min(limits.max + 1, most), wide, key.device)
    # The upper bound may be one more than the largest value of the dtype, which is then included.
    beyond: Any = False
    if not isinstance(maxval, Tensor) or torch.iinfo(maxval.dtype).max > most:
        beyond = torch.as_tensor(maxval > most, device=key.device)
    span = torch.where(high <= low, 1, high - low + beyond)
    first, second = split(key).unbind(0)
    draw = random_long if wide == torch.int64 else random_word
    half = 1 << (torch.iinfo(wide).bits // 2)
    power = _remainder(torch.full_like(span, half), span)
    power = _remainder(power * power, span)
    offset = _remainder(draw(first, shape), span) * power + _remainder(draw(second, shape), span)
    return (low + _remainder(offset, span)).to(dtype)


def _clipped(
    bound: Bound, least: int, most: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if isinstance(bound, Tensor):
        return bound.to(device).clamp(least, most).to(dtype)
    return torch.full((), min(max(bound, least), most), dtype=dtype, device=device)


def _remainder(x: Tensor, by: Tensor) -> Tensor:
    """``x % by`` of words taken as unsigned; ``x`` where ``by`` is zero, as XLA says."""
    bits = torch.iinfo(x.dtype).bits
    divisor = torch.where(by == 0, 1, by)
    half = (x >> 1) & torch.iinfo(x.dtype).max
    quotient = torch.div(half, divisor, rounding_mode="trunc") << 1
    rest = x - quotient * divisor
    sign = -(1 << (bits - 1))  # flipped, unsigned words compare as signed ones
    rest = torch.where((rest ^ sign) >= (divisor ^ sign), rest - divisor, rest)
    large = torch.where((x ^ sign) >= (by ^ sign), x - by, x)  # by >= 2**(bits - 1)
    return torch.where(by == 0, x, torch.where(by < 0, large, rest))


def permutation(key: Tensor, x: int | Tensor, axis: int = 0, independent: bool = False) -> Tensor:
    """A random order of a tensor, as ``jax.random.permutation``.

    Args:
        key: a key, shape ``(2,)``.
        x: a tensor, or a number for ``torch.arange(x)``.
        axis: which axis is put in order.
        independent: whether each vector along the axis gets a different order.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Raises:
        TypeError: ``key`` is not a key, or ``x`` is a float or a tensor without axes.
        IndexError: ``axis`` is out of range.

    Example:
        >>> from functx.compat import random
        >>> random.permutation(random.key(0), 5)
        tensor([0, 1, 4, 3, 2])
    """
    check_key("permutation", key)
    x, axis = as_integer(x), as_integer(axis)
    if isinstance(x, int) and not isinstance(x, bool):
        x = torch.arange(max(x, 0), device=key.device)
    if not isinstance(x, Tensor) or not x.ndim:
        raise TypeError("random.permutation takes an integer or a tensor with at least one axis")
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(f"random.permutation: axis {axis} of a tensor with {x.ndim} axes")
    key = key.to(x.device)
    if independent or x.ndim == 1:
        return _shuffle(key, x, axis)
    order = _shuffle(key, torch.arange(x.shape[axis], device=x.device), 0)
    return torch.index_select(x, axis, order)


def _shuffle(key: Tensor, x: Tensor, axis: int) -> Tensor:
    # Sorted by random words as often as it takes for two elements with equal words to be unlikely.
    rounds = math.ceil(3 * math.log(max(1, x.numel())) / math.log(0xFFFFFFFF))
    for _ in range(rounds):
        key, now = split(key).unbind(0)
        # Words with their sign flipped sort as unsigned ones.
        order = torch.argsort(random_word(now, x.shape) ^ -(1 << 31), dim=axis, stable=True)
        x = torch.gather(x, axis, order)
    return x


def categorical(
    key: Tensor,
    logits: Tensor,
    axis: int = -1,
    shape: Sequence[int] | None = None,
    replace: bool = True,
    mode: str | None = None,
) -> Tensor:
    """Categories with the probabilities ``softmax(logits)``, as ``jax.random.categorical``.

    Args:
        key: a key, shape ``(2,)``.
        logits: logarithms of probabilities, up to a constant; a real tensor.
        axis: the axis of ``logits`` that numbers the categories.
        shape: the shape of the result. It must end in the shape of ``logits`` without ``axis``,
            which is the default.
        replace: if False, draws of one distribution (along the leading axes of ``shape``) differ.
        mode: as in `gumbel`.

    Returns:
        ``int64`` indices of that shape.

    Raises:
        ValueError: the shape does not end as said, or there are fewer
            categories than draws without replacement.
        IndexError: there is no such axis.

    Example:
        >>> import torch
        >>> from functx.compat import random
        >>> random.categorical(random.key(0), torch.tensor([0.0, 1.0, 2.0]), shape=(6,))
        tensor([1, 1, 2, 1, 2, 2])
    """
    check_key("categorical", key)
    check_mode("categorical", mode)
    axis = as_integer(axis)
    if not -logits.ndim <= axis < logits.ndim:
        raise IndexError(f"random.categorical: axis {axis} of logits with {logits.ndim} axes")
    axis %= logits.ndim
    key = key.to(logits.device)
    own = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    shape = own if shape is None else check_shape("categorical", shape)
    check_broadcast("categorical", shape, own)
    prefix = shape[: len(shape) - len(own)]
    if replace:
        rest = list(shape[len(prefix) :])
        rest.insert(axis, logits.shape[axis])
        noise = gumbel(key, (*prefix, *rest), logits.dtype, mode)
        return torch.argmax(noise + logits, dim=axis - logits.ndim)
    draws, categories = math.prod(prefix), logits.shape[axis]
    if draws > categories:
        raise ValueError(
            f"random.categorical: {draws} draws without replacement from {categories} categories"
        )
    noisy = logits + gumbel(key, logits.shape, logits.dtype, mode)
    # As in JAX, the first of several equal entries comes first. torch.topk does not order them.
    best = noisy.movedim(axis, -1).sort(stable=True, descending=True).indices[..., :draws]
    return best.movedim(-1, 0).reshape(shape)
