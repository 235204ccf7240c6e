"""Kept values in host memory: copied there when a region has run, and back when it is replayed.

On CUDA the copies run on a stream of their own, from and to pinned memory, so that they overlap
with computation: a replay begins with the copies of all that it will read, and of what the region
that ran before this one, and so is pulled back next, will read. On CPU they are plain copies, at
the same moments.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Thread(threading.local):
    def __init__(self) -> None:
        self.last: weakref.ref[Fetcher] | None = None
        self.observers: list[Callable[[Tensor, Tensor], None]] = []


_thread = _Thread()


@contextmanager
def on_offload(callback: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``callback(value, copy)`` for each value that this thread moves to host memory."""
    _thread.observers.append(callback)
    try:
        yield
    finally:
        _thread.observers.remove(callback)


@functools.lru_cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def to_host(t: Tensor) -> Tensor:
    """A copy of a plain tensor in host memory, with its layout; to be called below all levels."""
    host = _copied_to_host(t)
    for observer in _thread.observers:
        observer(t, host)
    return host


def _copied_to_host(t: Tensor) -> Tensor:
    if t.device.type != "cuda":
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)
    side = _side_stream(t.device)
    side.wait_stream(torch.cuda.current_stream(t.device))
    with torch.cuda.stream(side):
        host = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, pin_memory=True)
        host.copy_(t, non_blocking=True)
    t.record_stream(side)
    return host


class _Copy:
    """A copy on its way to a device."""

    __slots__ = ("_arrives", "_t")

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._arrives: Any = None
        if device.type != "cuda":
            self._t = _like(host, device).copy_(host)
            return
        side = _side_stream(device)  # which has written the host's copy
        with torch.cuda.stream(side):
            self._t = _like(host, device).copy_(host, non_blocking=True)
            self._arrives = side.record_event()

    def take(self) -> Tensor:
        """The copy, ready for what is computed next."""
        if self._arrives is not None:
            current = torch.cuda.current_stream(self._t.device)
            current.wait_event(self._arrives)
            self._t.record_stream(current)
        return self._t


def _like(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


class Fetcher:
    """Brings the values of one region back from host memory, ahead of the need.

    Args:
        hosts: the values in host memory, by key; the region's node holds them, this does not.
        devices: where they belong, by key.
    """

    def __init__(self, hosts: Mapping[int, Tensor], devices: Mapping[int, torch.device]) -> None:
        self._hosts = {key: weakref.ref(t) for key, t in hosts.items()}
        self._devices = devices
        self._copies: dict[int, _Copy] = {}
        self._replays = 0
        # The region that ran before is pulled back after this one.
        self._before, _thread.last = _thread.last, weakref.ref(self)

    def begin(self, hosts: Mapping[int, Tensor]) -> None:
        """A replay that reads ``hosts`` begins: start their copies, and those of the next one."""
        self._replays += 1
        self._start(hosts)
        following = None if self._before is None else self._before()
        if following is not None and following._replays < self._replays:
            alive = {key: t for key, ref in following._hosts.items() if (t := ref()) is not None}
            following._start(alive)

    def brings(self, key: int) -> bool:
        """Whether a value is in host memory."""
        return key in self._devices

    def value(self, key: int, host: Tensor) -> Tensor:
        """A copy of ``host`` on its device, ready for what is computed there next."""
        copy = self._copies.pop(key, None) or _Copy(host, self._devices[key])
        return copy.take()

    def end(self) -> None:
        """The replay has ended; what it did not read is not needed."""
        self._copies.clear()

    def _start(self, hosts: Mapping[int, Tensor]) -> None:
        for key, host in hosts.items():
            if key in self._devices and key not in self._copies:
                self._copies[key] = _Copy(host, self._devices[key])
