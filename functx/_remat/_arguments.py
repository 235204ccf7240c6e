"""What an operation is given beside tensors: how it is told from what a replay gives.

Numbers, strings and the like are compared as they are (`SCALARS`). Arrays, buffers and objects that
stand for a number are data from outside: what they hold when the operation reads them is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from functx._remat._past_torch import held_by

SCALARS = (
    *(int, float, complex, str, type(None), range, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

TENSOR, LIST, SLICE = "a tensor", "a list", "a slice"
"""Stand among them where they tell ``where(c, 1, t)`` from ``where(c, t, 1)``.

Where a tensor follows a number, where a list ends, and a slice.
"""

NUMBERS = frozenset({int, float, bool, type(None)})
"""Types of most of them."""

SIMPLE = frozenset({*SCALARS} - {range} | NUMBERS)
"""Types of nearly all of them, which nothing in them can change."""

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TYPES = (int, float, complex, bool)


def same(recorded: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether scalars are what they were; one that is not a number is itself."""
    if len(recorded) != len(now):
        return False
    for a, b in zip(recorded, now):
        if not (a is b or (type(a) is type(b) and (_equal(a, b) or (a != a and b != b)))):
            return False
    return True


def _equal(a: Any, b: Any) -> Any:
    """``a == b``, but for zeros of other signs."""
    return a == b and (a.__class__ not in (float, complex) or repr(a) == repr(b))


def token(a: Any) -> Any:
    """Something that is equal for arguments that hold the same; ``None`` for what holds nothing.

    Functions, types and other objects are not told apart: a body may well make new ones each time.
    But what a function holds that is not torch's memory is compared (`_past_torch`).
    """
    if a in _TYPES if isinstance(a, type) else callable(a):
        return a if isinstance(a, type) else held_by([a]) or None
    try:
        view = memoryview(a)
    except (TypeError, ValueError, BufferError):
        view = None
    if view is not None:
        return view.shape, view.format, hash(view.tobytes())
    if hasattr(a, "__array_interface__"):  # of a type that has no buffers
        return type(a), hash(a.tobytes())
    for convert, name in ((operator.index, "__index__"), (float, "__float__")):
        if hasattr(type(a), name) and not isinstance(a, _SYMBOLS):
            try:
                return convert(a)
            except (TypeError, ValueError, RuntimeError):
                return None
    return None
