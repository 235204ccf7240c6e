"""What torch has set around a call, and must have set around its replay (rule 1).

The list is closed: autocast, the default device and dtype, SDPA backends, deterministic algorithms
and the precision of matrix products. Grad mode is always on in a replay; a region that is called
with it off is no region.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import call
from typing import Any

import torch

from functx import _norms
from functx import _torch_engine as _torch

_C: Any = torch._C


def _set_deterministic(wanted: bool) -> None:
    warn_only = _C._get_deterministic_algorithms_warn_only()
    torch.use_deterministic_algorithms(wanted, warn_only=warn_only)


def _set_warn_only(wanted: bool) -> None:
    torch.use_deterministic_algorithms(_C._get_deterministic_algorithms(), warn_only=wanted)


def _read() -> list[Any]:
    try:
        return [*map(call, _READ)]
    except RuntimeError:  # torch's newer API has set precision by backend
        by_backend = {b: _C._get_fp32_precision_getter(b, "matmul") for b in ("cuda", "mkldnn")}
        return [*map(call, _READ[:-1]), by_backend]


def _set_precision(wanted: Any) -> None:
    if isinstance(wanted, str):
        torch.set_float32_matmul_precision(wanted)
        return
    for backend, precision in wanted.items():
        _C._set_fp32_precision_setter(backend, "matmul", precision)


_FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    (_C._get_deterministic_algorithms, _set_deterministic),
    (_C._get_deterministic_algorithms_warn_only, _set_warn_only),
    (_C._get_float32_matmul_precision, _set_precision),
]
_READ = [read for read, _ in _FLAGS]
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


class Settings:
    """What is set now."""

    __slots__ = ("casts", "device", "flags", "norms")

    def __init__(self) -> None:
        self.flags = _read()
        self.casts = _casts() if _torch.any_autocast() else None
        self.device = _torch.default_device() if _torch.function_depth() else None
        self.norms = _torch.function_depth() > 0 and _norms.are_defined()

    def modes(self, now: Settings) -> list[Any]:
        """The function modes that a replay needs, where ``now`` is."""
        modes: list[Any] = []
        if self.device != now.device:
            modes.append(_torch.device_mode(self.device or torch.device("cpu")))
        if self.norms and not now.norms:
            modes.append(_norms.NormsByDefinition())
        return modes

    def put(self, now: Settings) -> None:
        """Set what was set here, where ``now`` is."""
        if self.flags != now.flags:
            for (_, write), wanted, value in zip(_FLAGS, self.flags, now.flags):
                if wanted != value:
                    write(wanted)
        if self.casts != now.casts:
            _put_casts(self.casts)


def _casts() -> dict[str, tuple[bool, torch.dtype]]:
    return {
        d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES
    }


def _put_casts(casts: dict[str, tuple[bool, torch.dtype]] | None) -> None:
    for device in _AUTOCAST_DEVICES:
        enabled, dtype = (casts or {}).get(device, (False, None))
        torch.set_autocast_enabled(device, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)


class CastCache:
    """Autocast's cache of casted weights, off: a cast must not depend on what ran before.

    Whether a cast runs would show in a replay, and a cast that a region made inside of its own tape
    would be handed to what runs after it.
    """

    __slots__ = ("was",)

    def __init__(self, settings: Settings) -> None:
        self.was = settings.casts is not None and torch.is_autocast_cache_enabled()
        if self.was:
            torch.set_autocast_cache_enabled(False)

    def put_back(self) -> None:
        """As it was."""
        if self.was:
            torch.set_autocast_cache_enabled(True)
