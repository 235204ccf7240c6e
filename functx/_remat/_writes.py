"""Which operations write to a tensor they are given.

Needed beforehand: what a region is about to write to is copied first, for replays to start from.
What this misses is noticed by its version counter afterwards, and refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from functx import _torch

# Python composites and kernels that write to some of their arguments without saying so by name.
_WRITES_STATISTICS = frozenset({"batch_norm", "instance_norm"})
_WRITES_IF_ASKED = frozenset({"embedding", "embedding_bag"})


def writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.startswith("_"):
        return True
    if name in ("__setitem__", "__set__") or (name.startswith("__i") and name.endswith("__")):
        return True
    if "out" in kwargs or kwargs.get("inplace") is True:
        return True
    if isinstance(func, FunctionType) and any(a is True for a in args):
        return True  # `inplace`, perhaps, of a function in torch.nn.functional
    if name in _WRITES_STATISTICS or name in _WRITES_IF_ASKED:
        return True
    return _torch.is_mutable(func) or name.startswith(("_foreach", "_fused"))
