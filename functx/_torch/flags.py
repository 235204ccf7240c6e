"""What torch computes with: flags of the process whose public getters warn, raise or are slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C


def _deterministic() -> tuple[bool, bool]:
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


def _precision() -> Any:
    try:
        return _C._get_float32_matmul_precision()
    except RuntimeError:  # torch's newer API has set it by backend
        return {b: _C._get_fp32_precision_getter(b, "matmul") for b in ("cuda", "mkldnn")}


def _set_precision(wanted: Any) -> None:
    if isinstance(wanted, str):
        torch.set_float32_matmul_precision(wanted)
        return
    for backend, precision in wanted.items():
        _C._set_fp32_precision_setter(backend, "matmul", precision)


FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (_deterministic, lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1])),
    (_precision, _set_precision),
]

# What else kernels are chosen by: a graph is for what these say.
BACKENDS: list[Callable[[], Any]] = [
    *(_C._get_mkldnn_enabled, _C._get_cudnn_enabled, _C._get_cudnn_benchmark),
    *(_C._get_cudnn_deterministic, _C._get_nnpack_enabled, torch.is_anomaly_enabled),
]
# For a quick look at whether any of `FLAGS` has changed.
QUICK: list[Callable[[], Any]] = [
    *(torch.get_default_dtype, _C._get_flash_sdp_enabled, _C._get_mem_efficient_sdp_enabled),
    *(_C._get_math_sdp_enabled, _C._get_cudnn_sdp_enabled, _C._get_sdp_priority_order),
    *(_C._get_deterministic_algorithms, _C._get_deterministic_algorithms_warn_only, _precision),
]


def read() -> list[Any]:
    """What each of `FLAGS` is now."""
    return [getter() for getter, _ in FLAGS]
