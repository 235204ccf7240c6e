"""What torch has set around a call, and must have set around its replay (rule 1).

The list is closed: autocast, default device and dtype, SDPA backends, deterministic algorithms and
the precision of matrix products. Grad mode is on in a replay, as it was where there is a region.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functx import _torch
from functx._core import norm_derivatives
from functx._torch import flags

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


class Settings(NamedTuple):
    """What is set at one time; two of them are compared as a whole."""

    flags: tuple[Any, ...]
    casts: Any  # by device, whether autocast is enabled, and its dtype; ``None`` without autocast
    caches: bool  # whether autocast keeps the casts of weights
    device: torch.device | None  # of ``with torch.device(...)``
    norms: int  # what is done with normalisations; see `norm_derivatives`

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


def settings_now() -> Settings:
    """What is set now."""
    casts, caches, device, norms = None, False, None, 0
    if _torch.any_autocast():
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        casts = {d: (enabled(d), dtype(d)) for d in _AUTOCAST_DEVICES}
        caches = torch.is_autocast_cache_enabled()
    if _torch.function_depth():  # else no mode is on: neither a device nor one for normalisations
        device, norms = _torch.default_device(), norm_derivatives.are_defined()
    # (`tuple.__new__` is what the class would call.)
    return tuple.__new__(Settings, (flags.read(), casts, caches, device, norms))
