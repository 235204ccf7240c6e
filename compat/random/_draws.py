"""Real-valued draws from keys, and masks that are made from them.

Invariant: each draw uses as many bits as in ``jax.random``, from the same counters.

A uniform number has as many random bits as its dtype has mantissa bits.  JAX sets them into the
mantissa of a number in [1, 2) and subtracts 1; an integer times a power of two is the same number.

Where the last bit is to agree (`uniform` between bounds, `dropout`), arithmetic is rounded as XLA's
compiler rounds it: a product and a sum of float32 or float64 are one fused multiply-add, where
torch rounds twice, and a division by a constant is a product with its reciprocal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from functx.compat.random._keys import (
    check_broadcast,
    check_key,
    check_shape,
    random_long,
    random_word,
)

_MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
# The number of random bits for each dtype; the upper ones become the mantissa.
_DRAWN = {torch.float16: 16, torch.bfloat16: 8, torch.float32: 32, torch.float64: 64}
_lowering = ContextVar("lowering", default=False)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


@contextmanager
def lowering() -> Iterator[None]:
    """A context for tracing to JAX, in which XLA itself fuses a product and a sum."""
    token = _lowering.set(True)
    try:
        yield
    finally:
        _lowering.reset(token)


def bits(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Random bits, as ``jax.random.bits``.

    Args:
        key: a key, shape ``(2,)``.
        shape: the shape of the result.
        dtype: ``uint8``, ``uint16``, ``uint32`` (the default) or ``uint64``.

    Returns:
        Unsigned integers of that shape and dtype, uniform over all values.

    Raises:
        ValueError: the dtype is not unsigned.

    Example:
        >>> from functx.compat import random
        >>> random.bits(random.key(0), (3,))
        tensor([4070199207, 4202968722, 1427181096], dtype=torch.uint32)
    """
    check_key("bits", key)
    shape = check_shape("bits", shape)
    dtype = torch.uint32 if dtype is None else dtype
    if dtype not in _UNSIGNED:
        raise ValueError(f"random.bits returns unsigned integers, not {dtype}")
    word = (random_long if dtype == torch.uint64 else random_word)(key, shape)
    if torch.compiler.is_compiling() and shape and dtype == torch.uint32:
        # Inductor does not vectorize a loop that holds a uint32.  A view as bytes ends the loop,
        # the other view is for free.
        return word.view(torch.uint8).view(dtype)
    return word.to(dtype)


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    minval: float | Tensor = 0.0,
    maxval: float | Tensor = 1.0,
) -> Tensor:
    """Uniform numbers in ``[minval, maxval)``, as ``jax.random.uniform``.

    Args:
        key: a key, shape ``(2,)``.
        shape: the shape of the result.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64``; torch's default if ``None``.
        minval: the lower bound, a number or a tensor that broadcasts to ``shape``.
        maxval: the upper bound. The result is differentiable with respect to both.

    Returns:
        Numbers of that shape and dtype.

    Raises:
        ValueError: the dtype is not real, or a bound does not broadcast.

    Example:
        >>> import torch
        >>> from functx.compat import random
        >>> random.uniform(random.key(0), (2,), minval=-1.0, maxval=1.0)
        tensor([0.8953, 0.9572])
    """
    shape, dtype = _checked("uniform", key, shape, dtype)
    unit = _unit(key, shape, dtype)
    numbers = not isinstance(minval, Tensor) and not isinstance(maxval, Tensor)
    if numbers and (minval, maxval) == (0, 1):
        return unit
    low, high = _bound(minval, key.device, dtype), _bound(maxval, key.device, dtype)
    check_broadcast("uniform", shape, low.shape, high.shape)
    return torch.maximum(low, _multiply_add(unit, high - low, low))


def _unit(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1)."""
    digits = _MANTISSA[dtype]
    word = (random_long if dtype == torch.float64 else random_word)(key, shape)
    word = (word >> (_DRAWN[dtype] - digits)) & ((1 << digits) - 1)
    return word.to(dtype) * 2.0**-digits


def bernoulli(
    key: Tensor, p: float | Tensor = 0.5, shape: Sequence[int] | None = None, mode: str = "low"
) -> Tensor:
    """True with probability ``p``, as ``jax.random.bernoulli``.

    Args:
        key: a key, shape ``(2,)``.
        p: the probability, a Python float (taken in torch's default dtype) or a real tensor.
        shape: the shape of the result; by default that of ``p``.
        mode: ``"low"``, or ``"high"`` for twice the random bits, right for tiny ``p`` too.

    Returns:
        A ``bool`` tensor.

    Raises:
        TypeError: ``p`` is not a float.
        ValueError: ``p`` does not broadcast, or ``mode`` is unknown.

    Example:
        >>> from functx.compat import random
        >>> random.bernoulli(random.key(0), 0.3, (4,))
        tensor([False, False, False, False])
    """
    check_key("bernoulli", key)
    check_mode("bernoulli", mode)
    if hasattr(p, "__array__") and not isinstance(p, float | Tensor):  # a number of NumPy
        p = torch.as_tensor(p)
    if not isinstance(p, float) and not (isinstance(p, Tensor) and p.dtype in _MANTISSA):
        kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
        raise TypeError(f"random.bernoulli takes a floating point probability, not {kind}")
    dtype = p.dtype if isinstance(p, Tensor) else torch.get_default_dtype()
    own = tuple(p.shape) if isinstance(p, Tensor) else ()
    shape = own if shape is None else check_shape("bernoulli", shape)
    check_broadcast("bernoulli", shape, own)
    if mode != "high":
        return uniform(key, shape, dtype) < p
    high, low = uniform(key, (2, *shape), dtype).unbind(0)
    return low * 2.0 ** -_MANTISSA[dtype] < p - high


def rademacher(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Signs, -1 or 1 with equal probability, as ``jax.random.rademacher``.

    The dtype is ``int32`` if none is given, as in JAX with 64-bit types off.  Of an unsigned one,
    -1 is the largest number.
    """
    heads = _unit(key, *_checked("rademacher", key, shape, torch.float32)) < 0.5
    # Torch has no arithmetic for wide unsigned integers.
    return (heads.to(torch.int32) * 2 - 1).to(dtype or torch.int32)


def dropout(
    key: Tensor,
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    broadcast_dims: Sequence[int] = (),
) -> Tensor:
    """Set elements to zero with probability ``p`` and divide the others by ``1 - p``.

    The same numbers as Flax's and Equinox's ``Dropout`` give for the key.

    Args:
        key: a key, shape ``(2,)``.
        x: a real or complex tensor.
        p: the probability of a zero, as in ``torch.nn.functional.dropout``.
        training: if False, ``x`` is returned.
        broadcast_dims: axes that share one mask.

    Returns:
        A tensor of the shape and dtype of ``x``, on its device.

    Raises:
        ValueError: ``p`` is not in [0, 1].

    Example:
        >>> import torch
        >>> from functx.compat import random
        >>> random.dropout(random.key(0), torch.ones(6), 0.5)
        tensor([0., 0., 2., 2., 0., 2.])
    """
    check_key("dropout", key)
    if not 0 <= p <= 1:
        raise ValueError(f"random.dropout: p={p} is not a probability in [0, 1]")
    if not training or p == 0:
        return x
    if p == 1:
        return torch.zeros_like(x)
    shape = list(x.shape)
    for axis in broadcast_dims:
        shape[axis] = 1
    keep = 1.0 - p
    mask = bernoulli(key.to(x.device), keep, shape)
    return torch.where(mask, _divide(x, keep), 0.0)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal numbers, as ``jax.random.normal``, but for torch's inverse error function.

    Arguments and errors are those of `uniform`.

    Example:
        >>> from functx.compat import random
        >>> random.normal(random.key(0), (2,))
        tensor([1.6226, 2.0253])
    """
    shape, dtype = _checked("normal", key, shape, dtype)
    # From the smallest number above -1 to 1, whose distance rounds to 2.
    above = -1.0 + 2.0 ** -(_MANTISSA[dtype] + 1)
    u = _unit(key, shape, dtype) * 2.0 + above
    return torch.erfinv(u) * math.sqrt(2)


def truncated_normal(
    key: Tensor,
    lower: float | Tensor,
    upper: float | Tensor,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Standard normal numbers between bounds, as ``jax.random.truncated_normal``.

    Args:
        key: a key, shape ``(2,)``.
        lower: a number or a tensor.
        upper: a number or a tensor.
        shape: the shape of the result; by default that to which the bounds broadcast.
        dtype: as in `uniform`.

    Returns:
        Numbers of that shape and dtype, in the open interval.  In a tail they are few: they are
        made of uniform numbers by the inverse of the error function, which is flat there.

    Raises:
        ValueError: the dtype is not real, or a bound does not broadcast.
    """
    _, dtype = _checked("truncated_normal", key, (), dtype)
    low, high = _bound(lower, key.device, dtype), _bound(upper, key.device, dtype)
    bounds = low.shape, high.shape
    shape = torch.broadcast_shapes(*bounds) if shape is None else shape
    check_broadcast("truncated_normal", check_shape("truncated_normal", shape), *bounds)
    root = math.sqrt(2)
    u = uniform(key, shape, dtype, torch.erf(low / root), torch.erf(high / root))
    infinity = torch.full((), math.inf, dtype=dtype, device=key.device)
    inside = torch.maximum(torch.erfinv(u) * root, torch.nextafter(low.detach(), infinity))
    return torch.minimum(inside, torch.nextafter(high.detach(), -infinity))


def exponential(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Exponentially distributed numbers of mean 1, in ``[0, inf)``, as ``jax.random.exponential``.

    Arguments and errors are those of `uniform`.
    """
    return -torch.log1p(-_unit(key, *_checked("exponential", key, shape, dtype)))


def gumbel(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    mode: str | None = None,
) -> Tensor:
    """Gumbel distributed numbers, as ``jax.random.gumbel``.

    Arguments and errors are those of `uniform`, and ``mode`` as in `bernoulli`; None is "low".
    """
    check_mode("gumbel", mode)
    shape, dtype = _checked("gumbel", key, shape, dtype)
    tiny = torch.finfo(dtype).tiny
    if mode != "high":
        return -torch.log(-torch.log(uniform(key, shape, dtype, tiny, 1.0)))
    high, low = uniform(key, (2, *shape), dtype).unbind(0)
    fine = high + 2.0 ** -_MANTISSA[dtype] * low + tiny
    return -torch.log(-torch.log1p(-torch.where(high >= 0.5, high, fine)))


def check_mode(name: str, mode: str | None) -> None:
    """Raise an error for a mode that JAX does not have."""
    if mode not in (None, "low", "high"):
        raise ValueError(f"random.{name}: mode must be 'low' or 'high', not {mode!r}")


def _checked(
    name: str, key: Tensor, shape: Sequence[int], dtype: torch.dtype | None
) -> tuple[tuple[int, ...], torch.dtype]:
    check_key(name, key)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in _MANTISSA:
        raise ValueError(
            f"random.{name} returns float16, bfloat16, float32 or float64, not {dtype}"
        )
    return check_shape(name, shape), dtype


def _bound(x: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(x, Tensor):
        return x.to(device, dtype)
    return torch.full((), x, dtype=dtype, device=device)


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c``, in float32 and float64 with one rounding."""
    product = a * b
    if _lowering.get() or a.dtype not in (torch.float32, torch.float64):
        return product + c
    if a.dtype == torch.float32:  # a product of two is exact in float64
        return (a.double() * b.double() + c.double()).float()
    # Add the rounding errors of the product (Dekker, Numerische Mathematik 18, 1971) and the sum.
    a_high, b_high = _high(a), _high(b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total = product + c
    other = total - product
    return total + ((product - (total - other)) + (c - other) + error)


def _high(x: Tensor) -> Tensor:
    scaled = x * (2.0**27 + 1)
    return scaled - (scaled - x)


def _divide(x: Tensor, by: float) -> Tensor:
    """``x / by`` as a product with the reciprocal, which in bfloat16 is computed in float32."""
    divisor = torch.full((), by, dtype=x.dtype, device=x.device)
    if x.dtype == torch.bfloat16:
        return (x.float() * divisor.float().reciprocal()).to(x.dtype)
    return x * divisor.reciprocal()
