"""Moving along the stack of active transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from functx import _torch


class at_level:
    """Run with only the transforms up to ``level`` active."""

    __slots__ = ("_contexts", "_level")

    def __init__(self, level: int) -> None:
        self._level = level

    def __enter__(self) -> None:
        self._contexts: list[Any] = []
        if _torch.peek_interpreter_stack() is None:
            return
        while _torch.interpreter_depth() > self._level:
            context = _torch.current_interpreter().lower()
            context.__enter__()
            self._contexts.append(context)

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc)


def saved_levels() -> Callable[[], AbstractContextManager[None]]:
    """A context that runs with the levels that are active now, and no others."""
    with _torch.cleared_interpreter_stack() as levels:
        pass

    @contextmanager
    def restored() -> Iterator[None]:
        with _torch.cleared_interpreter_stack(), _torch.restored_interpreter_stack(levels):
            yield

    return restored
