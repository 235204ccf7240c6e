"""Which errors mean that memory ran out, and which that ``vmap`` can't run a function."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "not enough memory" in text or "can't allocate memory" in text or "out of memory" in text
    )


# What torch says where an operation has no rule for vmap, or none that fits.
_LIMITS = ("vmap", "batching rule", "doesn't match the broadcast shape", "data-dependent")


def is_of_vmap(error: BaseException) -> bool:
    """Whether an error may be due to ``vmap``: one example alone may well run."""
    text = str(error).lower()
    return any(limit in text for limit in _LIMITS)
