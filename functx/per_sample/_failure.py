"""Which errors mean that memory ran out, and which that ``vmap`` can't run a function; warnings."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

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
_LIMITS = (
    *("vmap", "batching rule", "doesn't match the broadcast shape", "data-dependent"),
    *("sparse", "scalar type"),  # of autocast, which comes by where vmap takes operations apart
)


def is_of_vmap(error: BaseException) -> bool:
    """Whether an error may be due to ``vmap``: one example alone may well run."""
    text = str(error).lower()
    return any(limit in text for limit in _LIMITS)


def free_memory() -> None:
    """What a failed run left behind goes back. To be called when its traceback is gone."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def in_halves(
    run: Callable[[int, int], Any], size: int, take: Callable[[Any], None] = lambda result: None
) -> bool:
    """``run(0, size)``; where memory runs out, the same in halves, and halves of these.

    Args:
        run: Does all for the examples from one number to another, or raises and has done nothing.
        size: How many there are.
        take: Takes what it returned; where this raises, nothing is tried again.

    Returns:
        Whether memory ran out.
    """
    ran_out, left = False, [(0, size)]
    while left:
        start, stop = left.pop()
        middle = (start + stop) // 2
        try:
            result = run(start, stop)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or stop - start <= 1:
                raise
        else:
            take(result)
            continue
        free_memory()
        ran_out = True
        left += [(middle, stop), (start, middle)]
    return ran_out


def outside() -> int:
    """The ``stacklevel`` of a warning for whoever called ``per_sample``."""
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("functx."):
        level, frame = level + 1, frame.f_back
    return level
