"""Telling tools which regions keep what, and when they run again; or making none.

What is observed is per thread: a tool that measures sees what its own thread runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor


class _Observers(threading.local):
    def __init__(self) -> None:
        self.of_nodes: list[Callable[[list[Tensor], str, int], None]] = []
        self.of_replays: list[Callable[[str], AbstractContextManager[Any]]] = []
        self.of_names: list[Callable[[Tensor, str], None]] = []
        self.without = 0


_observers = _Observers()


@contextmanager
def on_region(callback: Callable[[list[Tensor], str, int], None]) -> Iterator[None]:
    """Call ``callback(inputs, name, level)`` for each node that an outermost region gets.

    Args:
        callback: receives what the node keeps of its inputs, as they are at its level, the
            region's name, and the level.
    """
    _observers.of_nodes.append(callback)
    try:
        yield
    finally:
        _observers.of_nodes.remove(callback)


@contextmanager
def on_replay(around: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter ``around(name)`` around each replay of a region."""
    _observers.of_replays.append(around)
    try:
        yield
    finally:
        _observers.of_replays.remove(around)


@contextmanager
def on_name(callback: Callable[[Tensor, str], None]) -> Iterator[None]:
    """Call ``callback(value, name)`` for each tensor that `checkpoint_name` names."""
    _observers.of_names.append(callback)
    try:
        yield
    finally:
        _observers.of_names.remove(callback)


@contextmanager
def no_regions() -> Iterator[None]:
    """What is a region elsewhere is a plain call in here."""
    _observers.without += 1
    try:
        yield
    finally:
        _observers.without -= 1


def are_off() -> bool:
    """Whether regions are plain calls now."""
    return _observers.without > 0


def tell_of_node(inputs: Sequence[Tensor], name: str, level: int) -> None:
    """A node was made."""
    for callback in _observers.of_nodes:
        callback(list(inputs), name, level)


def tell_of_name(value: Tensor, name: str) -> None:
    """A value was named."""
    for callback in _observers.of_names:
        callback(value, name)


def around_replay(name: str) -> list[AbstractContextManager[Any]]:
    """What the observers want around a replay."""
    return [around(name) for around in _observers.of_replays]
