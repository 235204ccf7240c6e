"""Private names for state of the process that users set, beside those in `_torch`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import parametrize as _parametrize


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Hooks that the user has around this point do not see what tapes in here save."""
    hooks = []
    try:
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hooks.append(top)
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def parametrization_cache() -> tuple[int, dict[Any, Any]] | None:
    """How deep in ``parametrize.cached()`` this is, and what it holds; ``None`` outside."""
    if not _parametrize._cache_enabled:
        return None
    return _parametrize._cache_enabled, dict(_parametrize._cache)


def set_parametrization_cache(state: tuple[int, dict[Any, Any]] | None) -> None:
    """Put back what `parametrization_cache` gave."""
    _parametrize._cache_enabled, _parametrize._cache = state or (0, {})


def foreign_saved_tensors_hooks() -> bool:
    """Whether hooks see what the tape saves that torch did not make: what it holds is unknown."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and not (getattr(top[0], "__module__", None) or "").startswith("torch.")
