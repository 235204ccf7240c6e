"""Memory that nobody may read is full of NaN, or of numbers that are no index, while tests run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from functx import _torch, _unwritten
from functx._remat import _letting_go


def fill_of(dtype: torch.dtype) -> Any:
    """What no result may depend on."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def filled(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """As `_unwritten.unwritten`, in memory of its own, which is full."""
    count = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    with _torch.without_modes():
        flat = torch.full((count,), fill_of(dtype), dtype=dtype, device=device)
        return flat.as_strided(shape, stride)


def gone(t: torch.Tensor) -> torch.Tensor:
    """As `_letting_go._nothing_like`, full."""
    with (
        torch.inference_mode(False),
        _torch.without_modes(),
        _torch.cleared_interpreter_stack(),
    ):
        return torch.full((), fill_of(t.dtype), dtype=t.dtype, device=t.device).expand(t.shape)


@contextmanager
def unwritten_memory_shows() -> Iterator[None]:
    """Of what a replay leaves out, and of what it has let go of, any read shows in results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_unwritten, "unwritten", filled)
        patch.setattr(_letting_go, "_nothing_like", gone)
        yield
