"""Kept values in host memory: copied there when a region has run, and back when it is replayed.

On CUDA the copies run on a stream of their own, from and to pinned memory, so that they overlap
with computation. On CPU they are plain copies: the same path, without the point of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.lru_cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def to_host(t: Tensor) -> Tensor:
    """A copy of ``t`` in host memory, with its layout."""
    if t.device.type != "cuda":
        host = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        return host.copy_(t)
    side = _side_stream(t.device)
    side.wait_stream(torch.cuda.current_stream(t.device))
    with torch.cuda.stream(side):
        host = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, pin_memory=True)
        host.copy_(t, non_blocking=True)
    t.record_stream(side)
    return host


def from_host(host: Tensor, device: torch.device) -> Tensor:
    """A copy of ``host`` on a device, ready for what is computed there next."""
    if device.type != "cuda":
        t = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        return t.copy_(host)
    side, current = _side_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        t = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        t.copy_(host, non_blocking=True)
    current.wait_stream(side)
    t.record_stream(current)
    return t
