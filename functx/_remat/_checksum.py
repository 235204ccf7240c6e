"""A number that tells whether a tensor has the same bits as another.

Integer arithmetic on the bits: exact, the same on every device and for every order of summation,
and blind to no NaN. Each position has a weight of its own, so that a permutation is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from functx import _torch
from functx._remat._holders import base_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_BLOCK = 1 << 18
"""How many entries are weighed at a time, which bounds what that takes: 2 MiB, a few times."""
_LEAST = 1 << 7
_AT_ONCE = {"cpu": 1 << 15}
"""Of `bits_of`: what stays in a cache. Elsewhere each block costs as much as many entries."""
_AT_ONCE_ELSEWHERE = 1 << 22


def checksum(t: Tensor, *, lean: bool = False) -> int | None:
    """A checksum of shape, dtype and bits of the plain tensor inside all wrappers.

    Costs two passes over the memory of ``t`` and, on a GPU, a wait for it.

    Args:
        t: the tensor.
        lean: whether to take less memory, a small part of that of ``t``, and more time.

    Returns:
        64 bits; ``None`` for what has no bits to read: fake tensors, and layouts other than
        strided and COO. A tensor made of others has those of its parts.
    """
    if _torch.tracing():
        return None
    with ExitStack() as stack:
        unobserved(stack)
        try:
            return _of_parts(base_of(t), lean)
        except (NotImplementedError, RuntimeError):
            return None


def bits_of(t: Tensor) -> Tensor | None:
    """A checksum of the bits of a plain strided tensor, where it is: nobody waits for a GPU.

    Returns:
        64 bits; ``None`` where they can't be read.
    """
    with ExitStack() as stack:
        unobserved(stack)
        try:
            t = t.int_repr() if t.is_quantized else t
            total = torch.zeros((), dtype=torch.int64, device=t.device)
            for part in _weighed(t, _AT_ONCE.get(t.device.type, _AT_ONCE_ELSEWHERE)):
                total = _mix(total.add_(part))
            return total
        except (NotImplementedError, RuntimeError):
            return None


def has_bits(t: Tensor, bits: Tensor | None) -> bool:
    """Whether ``t`` has the bits that `bits_of` told; not so where nobody can tell."""
    if bits is None or (t.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    now = bits_of(t)
    with ExitStack() as stack:
        unobserved(stack)
        return now is not None and now.device == bits.device and bool(now == bits)


def unobserved(stack: ExitStack) -> None:
    """Until the stack unwinds, run below all transforms, tapes and modes."""
    stack.enter_context(_torch.cleared_interpreter_stack())
    stack.enter_context(torch.no_grad())
    stack.enter_context(_torch.without_modes())


def _of_parts(t: Tensor, lean: bool) -> int | None:
    if t.layout is torch.sparse_coo:
        return hash(tuple(_of_strided(p, lean) for p in _torch.sparse_coo_parts(t)))
    if _torch.is_traceable_wrapper_subclass(t):
        names, _ = t.__tensor_flatten__()
        return hash(tuple(_of_parts(getattr(t, name), lean) for name in names))
    if t.is_quantized:  # as such, its bits can't be read: the process crashes
        return hash((_of_strided(t.int_repr(), lean), str(t.dtype), str(t.qscheme())))
    return _of_strided(t, lean) if t.layout is torch.strided else None


def _of_strided(t: Tensor, lean: bool) -> int:
    most = max(_LEAST, min(_BLOCK, t.numel() >> 7)) if lean else _BLOCK
    total = 0
    for part in _weighed(t, most):
        total = hash((total, int(part)))
    return hash((total, str(t.dtype), tuple(t.shape)))


def _weighed(t: Tensor, most: int) -> Iterator[Tensor]:
    """The sum of each block's entries, by place."""
    n, weights = -1, t
    for block in _blocks(t.detach(), most):
        bits = block.resolve_conj().resolve_neg().contiguous().reshape(-1)
        bits = bits.view(_INTEGERS[bits.element_size()])
        # Neither in the entries nor in the weights may a pattern survive: all differences between
        # the entries of a dropout mask, say, are multiples of one power of two.
        if n != bits.numel():
            n = bits.numel()
            weights = _mix(torch.arange(1, n + 1, device=bits.device))
        yield _mix(bits.to(torch.int64, copy=True)).mul_(weights).sum()


def _blocks(t: Tensor, most: int) -> Iterator[Tensor]:
    """Parts of at most so many entries, the same for all layouts: what is copied is small."""
    if t.numel() <= most:
        yield t
    else:
        rows = max(1, most * len(t) // t.numel())
        for part in t.split(rows) if len(t) > 1 else t.unbind():
            yield from _blocks(part, most)


def _mix(numbers: Tensor) -> Tensor:
    """Make each 64-bit number another one that all its bits have a part in."""
    for _ in range(2):
        numbers.mul_(_ODD).bitwise_xor_(numbers.bitwise_right_shift(31))
    return numbers


_ODD = 0x1E3779B97F4A7C15
