"""Who applies custom Functions on this thread, and whether the engine runs.

``Function.apply`` passes through no mode. What observes it (``NOTE [custom functions]`` in
`_tracker`) asks here first; the JAX lowering answers while it traces a function, and `per_sample`
while it checks a compiled loss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from functx._remat._tapes import nodes_of

Apply = Callable[..., Any]
Hook = Callable[[type, Apply, Sequence[Any]], Any]
"""Takes the Function, its own ``apply`` and the arguments; returns what ``apply`` returns."""


class Running(threading.local):
    """What runs on this thread.

    Attributes:
        engine: the engine's own operations: a ``detach`` is none that a user wrote.
        keeping: how many traces are under way that leave each region in their graph as a node.
    """

    engine = False
    keeping = 0


running = Running()


class _Hooks(threading.local):
    current: Hook | None = None


_hooks = _Hooks()


@contextmanager
def intercepting(hook: Hook) -> Iterator[None]:
    """Let ``hook`` apply the custom Functions of this thread."""
    outer, _hooks.current = _hooks.current, hook
    try:
        yield
    finally:
        _hooks.current = outer


def applied(cls: type, apply: Apply, args: Sequence[Any]) -> Any:
    """The result of a custom Function."""
    hook = _hooks.current
    return apply(*args) if hook is None else hook(cls, apply, args)


_KEPT = frozenset({bool, int, float, complex, str})


def kept_numbers(out: Any) -> int | None:
    """A checksum of the numbers and the like that a custom Function keeps for its backward.

    Args:
        out: what it gave.
    """
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if not isinstance(first, Tensor):
        return None
    kept = [
        (key, x)
        for node in nodes_of([first])
        for key, x in getattr(node, "__dict__", {}).items()
        if type(x) in _KEPT and not key.startswith("_")
    ]
    return hash(repr(sorted(kept, key=repr))) if kept else None
