"""The surroundings of a region that a replay restores: random numbers and autocast.

A replay leaves the global state as it found it. Default generators belong to the process, so
replays that restore one hold a process-wide lock; what other threads draw from it meanwhile is
not reproducible.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from functx._remat._region import Options

_generators = threading.RLock()


class Environment:
    """What a region found around it when it ran first."""

    __slots__ = ("_autocast", "_random")

    def __init__(self, options: Options, inputs: Sequence[Tensor]) -> None:
        devices = {t.device for t in inputs}
        types = {"cpu", *(d.type for d in devices)}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            types.add("cuda")
        self._autocast = [(kind, *_autocast_state(kind)) for kind in types if _has_autocast(kind)]
        self._random: dict[torch.device, Tensor] = {}
        if options.preserve_rng_state:
            self._random[torch.device("cpu")] = torch.get_rng_state()
            for device in devices:
                if device.type == "cuda":
                    self._random[device] = torch.cuda.get_rng_state(device)

    def seal(self) -> None:
        """The first run ended: states that it did not draw from need not be kept."""
        self._random = {
            device: state
            for device, state in self._random.items()
            if not _equal(state, _rng_state(device))
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The same surroundings, for a replay."""
        with ExitStack() as stack:
            for kind, enabled, dtype, cache in self._autocast:
                if (enabled, dtype, cache) != _autocast_state(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                    )
            if self._random:
                stack.enter_context(_generators)
                for device, state in self._random.items():
                    stack.callback(_set_rng_state, device, _rng_state(device))
                    _set_rng_state(device, state)
            yield


def _autocast_state(kind: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def _rng_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_rng_state(device: torch.device, state: Any) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def _equal(a: Tensor, b: Tensor) -> bool:
    # Not torch.equal: reading the state must be no operation that a mode could see.
    return ctypes.string_at(a.data_ptr(), a.numel()) == ctypes.string_at(b.data_ptr(), b.numel())
