"""Masks of padding in Hugging Face transformers under ``vmap``.

Its models ask whether a mask masks anything, and go without one if not. That can't be asked of a
mask that ``vmap`` maps. Where a graph is traced they don't ask, and mapped masks are treated alike:
the mask is used, whatever is in it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from functx import _torch


def read_no_masks() -> None:
    """From now on, transformers don't look into a mask that ``vmap`` maps, if they are loaded.

    Nothing else changes: of such a mask ``bool`` would raise.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    before = getattr(module, "is_tracing", None)
    if before is None or isinstance(before, _Asked):
        return
    module.is_tracing = _Asked(before)


class _Asked:
    """``is_tracing`` of transformers, which is asked before values are read."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, tensor: Any = None) -> bool:
        return bool(self._before(tensor)) or _is_mapped(tensor)


def _is_mapped(value: Any) -> bool:
    """Whether ``vmap`` maps a tensor, at any level."""
    while isinstance(value, torch.Tensor) and _torch.is_wrapped(value):
        if _torch.is_batched(value):
            return True
        value = _torch.inner_of(value)
    return False
