"""Saved values in host memory: copied there after a region ran, and back when it is replayed.

On CUDA the copies run on a separate stream, from and to pinned memory, so that they overlap with
computation. When a replay begins, it starts the copies of all values that it will read. It also
starts those of the region that ran before it in the forward pass, because that region is replayed
next. On CPU the copies are synchronous, at the same moments.
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
    """A context that calls ``callback(value, copy)`` for each value moved on this thread."""
    before = _observers.set((*_observers.get(), callback))
    try:
        yield
    finally:
        _observers.reset(before)


def _copied(t: Tensor, device: torch.device | str, pin: bool = False) -> Tensor:
    new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device, pin_memory=pin)
    return new.copy_(t, non_blocking=True)


def to_host(t: Tensor) -> Tensor:
    """Copy a plain tensor to host memory, with its strides. Call it below all functorch levels."""
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
    """Start a copy to a device; returns the copy, and the event that says it has arrived."""
    if device.type != "cuda":
        return _copied(host, device), None
    # The stream that copied the value to the host, so the copy back waits for it.
    side = _side_stream(device)
    with torch.cuda.stream(side):
        return _copied(host, device), side.record_event()


class Fetcher:
    """Copies the values of one region back from host memory before they are needed.

    Args:
        hosts: the values in host memory, by key. Only weak references are kept; the region's node
            owns the values.
        devices: the device of each value, by key.
    """

    def __init__(self, hosts: Mapping[int, Tensor], devices: Mapping[int, torch.device]) -> None:
        self._hosts = weakref.WeakValueDictionary(hosts)
        self._devices = devices
        self._copies: dict[int, tuple[Tensor, Any]] = {}
        self._replays = 0
        # The region that ran before this one is pulled back after it.
        self._before = _last.get()
        _last.set(weakref.ref(self))

    def begin(self, hosts: Mapping[int, Tensor]) -> None:
        """Start the copies for a replay that reads ``hosts``, and those for the next replay."""
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
        """Whether the value with this key was moved to host memory."""
        return key in self._devices

    def value(self, key: int, host: Tensor) -> Tensor:
        """The copy of ``host`` on its device; the current stream waits until it has arrived."""
        started = self._copies.pop(key, None)
        t, arrival = started or _to_device(host, self._devices[key])
        if arrival is not None:
            current = torch.cuda.current_stream(t.device)
            current.wait_event(arrival)
            t.record_stream(current)
        return t

    def end(self) -> None:
        """Drop the copies that the replay did not read, after it has ended."""
        self._copies.clear()
