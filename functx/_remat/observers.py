"""Observers: tools see what regions save and when they run again, or switch regions off.

Observers are per thread: a tool that measures sees the regions of its thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor


class _Observers(threading.local):
    def __init__(self) -> None:
        self.of_nodes: list[Any] = []
        self.of_replays: list[Any] = []
        self.of_names: list[Any] = []
        self.of_runs: list[Any] = []
        self.recorded: dict[Any, Any] = {}  # earlier runs, for `of_runs`; see `runs`
        self.without: list[Any] = []  # if it is not empty, regions are plain calls
        self.tracers: list[Any] = []  # replacements of `forward.run` that make nodes of a graph


observers = _Observers()


@contextmanager
def within(registered: list[Any], observer: Any) -> Iterator[None]:
    """Register an observer."""
    registered.append(observer)
    try:
        yield
    finally:
        registered.remove(observer)


def on_region(callback: Callable[[list[Tensor], str, int], None]) -> AbstractContextManager[None]:
    """Call ``callback(kept_inputs, name, level)`` for each node that an outermost region gets."""
    return within(observers.of_nodes, callback)


def on_replay(around: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Enter ``around(name)`` around each replay of a region."""
    return within(observers.of_replays, around)


def on_name(callback: Callable[[Tensor, str], None]) -> AbstractContextManager[None]:
    """Call ``callback(value, name)`` for each tensor that `checkpoint_name` names."""
    return within(observers.of_names, callback)


@contextmanager
def on_run(callback: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``callback(name, how)`` after each forward of a region.

    ``how`` says that the run has followed a script ("followed"), that it has departed from one
    ("departed: at CALL"), or why it was recorded ("recorded: REASON"). The reason is "the first
    run" if this context has seen no earlier run of the region, or of its function, with inputs of
    the same kinds.
    """
    with within(observers.of_runs, callback):
        try:
            yield
        finally:
            if len(observers.of_runs) == 1:
                observers.recorded.clear()


def no_regions() -> AbstractContextManager[None]:
    """In this context, calls of regions are plain calls."""
    return within(observers.without, None)
