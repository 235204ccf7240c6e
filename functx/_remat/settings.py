"""What torch has set around a call, and must have set around its replay (rule 1).

The list is closed: autocast, default device and dtype, SDPA backends, deterministic algorithms and
the precision of matrix products. Grad mode is on in a replay, as it was where there is a region.
"""

from __future__ import annotations

from typing import Any

import torch

from functx import _torch
from functx._core import norm_derivatives
from functx._torch import flags

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


class Settings:
    """What is set now."""

    def __init__(self) -> None:
        self.flags = flags.read()
        self.casts: Any = None  # by device, whether autocast is enabled, and its dtype
        if _torch.any_autocast():
            enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
            self.casts = {d: (enabled(d), dtype(d)) for d in _AUTOCAST_DEVICES}
        self.caches = self.casts is not None and torch.is_autocast_cache_enabled()
        self.device = _torch.default_device() if _torch.function_depth() else None
        self.norms = _torch.function_depth() > 0 and norm_derivatives.are_defined()

    def modes(self, now: Settings) -> list[Any]:
        """The function modes that a replay needs, where ``now`` is."""
        same = self.device == now.device
        return [] if same else [_torch.DeviceContext(self.device or torch.device("cpu"))]

    def put(self, now: Settings) -> None:
        """Set what was set here, where ``now`` is."""
        if self.flags != now.flags:
            for (_, write), wanted, value in zip(flags.FLAGS, self.flags, now.flags):
                if wanted != value:
                    write(wanted)
        if self.casts != now.casts:
            for device in _AUTOCAST_DEVICES:
                enabled, dtype = (False, None) if self.casts is None else self.casts[device]
                torch.set_autocast_enabled(device, enabled)
                if dtype is not None:
                    torch.set_autocast_dtype(device, dtype)
