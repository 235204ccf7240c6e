"""Telling whoever asks which regions keep what, and when they run again; or making none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor


class _Observers(threading.local):
    def __init__(self) -> None:
        self.callbacks: list[Callable[[list[Tensor], str, int], None]] = []
        self.of_replays: list[Callable[[str], AbstractContextManager[Any]]] = []
        self.of_names: list[Callable[[Tensor, str], None]] = []
        self.without = 0


_observers = _Observers()


@contextmanager
def on_region(callback: Callable[[list[Tensor], str, int], None]) -> Iterator[None]:
    """Call ``callback(inputs, name, level)`` for each outermost region that gets an autograd node.

    Args:
        callback: receives the tensors the node keeps (explicit inputs, then captures) as they
            are at the level of the node, the region's name and the node's level of
            differentiation. It must not keep the tensors alive unless it means to.
    """
    _observers.callbacks.append(callback)
    try:
        yield
    finally:
        _observers.callbacks.remove(callback)


def observing() -> bool:
    """Whether anybody on this thread wants to know about nodes."""
    return bool(_observers.callbacks)


def notify(inputs: Sequence[Tensor], name: str, level: int) -> None:
    """Tell the observers of this thread about a node that was attached."""
    for callback in _observers.callbacks:
        callback(list(inputs), name, level)


@contextmanager
def on_name(callback: Callable[[Tensor, str], None]) -> Iterator[None]:
    """Call ``callback(value, name)`` for each plain tensor that `checkpoint_name` names."""
    _observers.of_names.append(callback)
    try:
        yield
    finally:
        _observers.of_names.remove(callback)


def notify_name(value: Tensor, name: str) -> None:
    """Tell the observers of this thread about a name."""
    for callback in _observers.of_names:
        callback(value, name)


@contextmanager
def on_replay(around: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter ``around(name)`` around each replay of a region in this thread."""
    _observers.of_replays.append(around)
    try:
        yield
    finally:
        _observers.of_replays.remove(around)


def observed(replay: AbstractContextManager[Any], name: str) -> AbstractContextManager[Any]:
    """The context of a replay, with what its observers want around it."""
    if not _observers.of_replays:
        return replay
    stack = ExitStack()
    for around in _observers.of_replays:
        stack.enter_context(around(name))
    stack.enter_context(replay)
    return stack


@contextmanager
def no_regions() -> Iterator[None]:
    """What is a region elsewhere is a plain call in this context and thread."""
    _observers.without += 1
    try:
        yield
    finally:
        _observers.without -= 1


def inlined() -> bool:
    """Whether regions are plain calls now."""
    return _observers.without > 0
