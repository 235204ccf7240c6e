"""Mark tapes that are recorded only to be transposed twice.

`functx.linearize` records a pullback, calls it with cotangents of zero, and transposes it. A
function with a forward mode and no reverse mode (for example a JAX function with a while loop) can
take part in that: for cotangents of zero its gradient is zero, and its forward mode serves as the
transpose of its pullback.
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
    """A context: nodes recorded at the current level will be pulled back with zeros only."""
    token = _level.set(_current())
    try:
        yield
    finally:
        _level.reset(token)


def is_only_transposed() -> bool:
    """Whether a node recorded now is in `only_transposed`; inner levels do not count."""
    level = _level.get()
    return level is not None and level == _current()
