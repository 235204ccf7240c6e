"""Kept values in host memory: copied there when a region has run, and back when it is replayed.

On CUDA the copies run on a stream of their own, from and to pinned memory, so that they overlap
with computation: a replay begins with the copies of all that it will read, and of what the region
that ran before this one, and so is pulled back next, will read. On CPU they are plain copies, at
the same moments.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_last: ContextVar[weakref.ref[Fetcher] | None] = ContextVar("_last", default=None)
_observers: ContextVar[tuple[Callable[..., None], ...]] = ContextVar("_observers", default=())
_side_stream: Callable[[torch.device], Any] = functools.cache(torch.cuda.Stream)


@contextmanager
def on_offload(callback: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Call ``callback(value, copy)`` for each value that this thread moves to host memory."""
    before = _observers.set((*_observers.get(), callback))
    try:
        yield
    finally:
        _observers.reset(before)


def _copied(t: Tensor, device: torch.device | str, pin: bool = False) -> Tensor:
    new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device, pin_memory=pin)
    return new.copy_(t, non_blocking=True)


def to_host(t: Tensor) -> Tensor:
    """A copy of a plain tensor in host memory, with its layout; to be called below all levels."""
    if t.is_cuda:
        side = _side_stream(t.device)
        side.wait_stream(torch.cuda.current_stream(t.device))
        with torch.cuda.stream(side):
            host = _copied(t, "cpu", pin=True)
        t.record_stream(side)
    else:
        host = _copied(t, "cpu")
    for observer in _observers.get():
        observer(t, host)
    return host


def _to_device(host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """A copy on its way to a device, and the event of its arrival there."""
    if device.type != "cuda":
        return _copied(host, device), None
    side = _side_stream(device)  # which has written the host's copy
    with torch.cuda.stream(side):
        return _copied(host, device), side.record_event()


class Fetcher:
    """Brings the values of one region back from host memory, ahead of the need.

    Args:
        hosts: the values in host memory, by key; the region's node holds them, this does not.
        devices: where they belong, by key.
    """

    def __init__(self, hosts: Mapping[int, Tensor], devices: Mapping[int, torch.device]) -> None:
        self._hosts = weakref.WeakValueDictionary(hosts)
        self._devices = devices
        self._copies: dict[int, tuple[Tensor, Any]] = {}
        self._replays = 0
        # The region that ran before is pulled back after this one.
        self._before = _last.get()
        _last.set(weakref.ref(self))

    def begin(self, hosts: Mapping[int, Tensor]) -> None:
        """A replay that reads ``hosts`` begins: start their copies, and those of the next one."""
        self._replays += 1
        self._start(hosts)
        following = None if self._before is None else self._before()
        if following is not None and following._replays < self._replays:
            following._start(following._hosts)

    def _start(self, hosts: Mapping[int, Tensor]) -> None:
        for key, host in hosts.items():
            if self.brings(key) and key not in self._copies:
                self._copies[key] = _to_device(host, self._devices[key])

    def brings(self, key: int) -> bool:
        """Whether a value is in host memory."""
        return key in self._devices

    def value(self, key: int, host: Tensor) -> Tensor:
        """A copy of ``host`` on its device, ready for what is computed there next."""
        started = self._copies.pop(key, None)
        t, arrival = started or _to_device(host, self._devices[key])
        if arrival is not None:
            current = torch.cuda.current_stream(t.device)
            current.wait_event(arrival)
            t.record_stream(current)
        return t

    def end(self) -> None:
        """The replay has ended; what it did not read is not needed."""
        self._copies.clear()
