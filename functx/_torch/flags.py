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


def read() -> tuple[Any, ...]:
    """What each of `FLAGS` is now."""
    # (Written out: regions read this at each call and each replay.)
    try:
        precision = _C._get_float32_matmul_precision()
    except RuntimeError:
        precision = _precision()
    return (
        torch.get_default_dtype(),
        _C._get_flash_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
        _C._get_sdp_priority_order(),
        (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        precision,
    )
