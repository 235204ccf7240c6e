"""What torch has set around a call, and must have set around its replay (rule 1).

The list is closed: autocast, the default device and dtype, SDPA backends, deterministic algorithms
and the precision of matrix products. Grad mode is always on in a replay; a region that is called
with it off is no region.
"""

from __future__ import annotations

from typing import Any

import torch

from functx import _norms, _torch
from functx._torch import flags

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


class Settings:
    """What is set now."""

    __slots__ = ("caches", "casts", "device", "flags", "norms")

    def __init__(self) -> None:
        self.flags = flags.read()
        self.casts = _casts() if _torch.any_autocast() else None
        self.caches = self.casts is not None and torch.is_autocast_cache_enabled()
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
            for (_, write), wanted, value in zip(flags.FLAGS, self.flags, now.flags):
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
