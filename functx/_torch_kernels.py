"""Which kernels torch picks: flags of the process, whose public getters warn, raise or are slow.

A replay under other kernels gives other roundings, or operations that have no derivative: attention
that ran forward inside ``sdpa_kernel(MATH)`` has a second derivative, its replay outside has none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C

_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
)
_READ = [read for read, _ in _FLAGS]
_call: Callable[[Callable[[], Any]], Any] = operator.call


def kernels() -> list[Any]:
    """What is allowed now."""
    return [*map(_call, _READ)]


def allow_kernels(wanted: list[Any]) -> None:
    """Put back what `kernels` gave."""
    for (read, write), value in zip(_FLAGS, wanted, strict=True):
        if read() != value:
            write(value)
