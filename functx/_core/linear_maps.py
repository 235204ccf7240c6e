"""Whether the nodes of a level are only recorded to be transposed twice.

`functx.linearize` takes the transpose of a pullback, at cotangents of zero.  A function that has a
forward mode and no reverse mode (a JAX function with a while loop) can take part in that: its
gradient of zeros is zero, and what that transposes to is its forward mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from functx import _torch

_level: ContextVar[int | None] = ContextVar("level", default=None)


def _current() -> int | None:
    interpreter = _torch.peek_interpreter()
    return None if interpreter is None else interpreter.level()


@contextmanager
def only_transposed() -> Iterator[None]:
    """Pullbacks of the current level's nodes, recorded inside, will be called with zeros alone."""
    token = _level.set(_current())
    try:
        yield
    finally:
        _level.reset(token)


def is_only_transposed() -> bool:
    """Whether that is so of a node that is recorded now; of a level further in it is not."""
    level = _level.get()
    return level is not None and level == _current()
