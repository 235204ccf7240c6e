"""Telling whoever asks which regions keep what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


class _Observers(threading.local):
    def __init__(self) -> None:
        self.callbacks: list[Callable[[list[Tensor], str], None]] = []


_observers = _Observers()


@contextmanager
def on_region(callback: Callable[[list[Tensor], str], None]) -> Iterator[None]:
    """Call ``callback(inputs, name)`` for each region of this thread that gets an autograd node.

    Args:
        callback: receives the tensors the node keeps (explicit inputs, then captures) as they
            are at the level of the node, and the region's name. It must not keep them alive
            unless it means to.
    """
    _observers.callbacks.append(callback)
    try:
        yield
    finally:
        _observers.callbacks.remove(callback)


def notify(inputs: Sequence[Tensor], name: str) -> None:
    """Tell the observers of this thread about a node that was attached."""
    for callback in _observers.callbacks:
        callback(list(inputs), name)
