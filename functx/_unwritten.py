"""Memory nobody wrote to, and which therefore takes none.

A replay hands out tensors that nobody reads in place of what it leaves out: of some shape, strides
and memory of their own, so that views can be taken of them and told from others'. On CPU that need
not be real memory: all of them lie over one stretch of addresses that the operating system gives no
pages, as long as nobody writes there (who reads sees zeros). Elsewhere, and where there is no such
stretch, it is memory as torch allocates it.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from functx import _torch

_WORTH = 64
"""Bytes; less is allocated faster than anything else."""
_STRETCH = 1 << 40
_NO_RESERVE = 0x4000  # on Linux; Python does not name it before 3.13


@functools.cache
def _stretch() -> mmap.mmap | None:
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        return mmap.mmap(-1, _STRETCH, flags=flags)
    except (AttributeError, OSError, ValueError):  # another system, or a limit on addresses
        return None


def unwritten(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor that nobody may read or write.

    Args:
        shape: of the tensor.
        stride: in elements.
        dtype: of the tensor.
        device: where it is.
    """
    if device.type == "cpu" and 0 not in shape:
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
        if _WORTH <= count * dtype.itemsize <= _STRETCH and (stretch := _stretch()) is not None:
            try:
                with _torch.without_modes():
                    flat = torch.frombuffer(stretch, dtype=dtype, count=count)
                    return flat.as_strided(shape, stride)
            except (RuntimeError, TypeError, ValueError):  # a dtype that is not for buffers
                pass
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
