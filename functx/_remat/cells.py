"""Closure cells as they were at the call (rule 1): names bound again must not change a replay.

A replay calls a copy of the function, with cells of its own. That also keeps a node from holding
the caller's cells, which may come to hold the region's results: ``x = remat(lambda t: x + t)(y)``
would be a cycle through C++ that nothing collects. Copied are the function, what it closes over
that is a function itself, partials and bound methods; nothing else of Python's is looked into (rule
5).
"""

from __future__ import annotations

import functools
import types
from typing import Any


class Wrapper:
    """What calls a ``function`` of the user's, whose cells are its own, with ``options``."""

    def __init__(self, function: Any, options: Any) -> None:
        self.function, self.options = function, options


def frozen(f: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy of ``f`` whose cells nobody can bind anew; ``f`` itself if it has none."""
    kind = type(f)
    if kind is types.FunctionType:
        return f if f.__closure__ is None else _copied(f, {} if copies is None else copies)
    if kind is functools.partial:
        inner = frozen(f.func, copies)
        return f if inner is f.func else functools.partial(inner, *f.args, **f.keywords)
    if kind is types.MethodType:
        inner = frozen(f.__func__, copies)
        return f if inner is f.__func__ else types.MethodType(inner, f.__self__)
    if isinstance(f, Wrapper):
        inner = frozen(f.function, copies)
        return f if inner is f.function else type(f)(inner, f.options)
    return f


def _copied(f: types.FunctionType, copies: dict[int, Any]) -> types.FunctionType:
    """A copy of a function, and of its cells; ``copies`` are by the id of what they are of."""
    if id(f) in copies:
        return copies[id(f)]
    cells = f.__closure__ or ()
    new = [c for c in cells if id(c) not in copies]
    for cell in new:
        copies[id(cell)] = types.CellType()
    closure = tuple(copies[id(cell)] for cell in cells)
    copy = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, closure)
    copies[id(f)] = copy
    copy.__kwdefaults__, copy.__qualname__ = f.__kwdefaults__, f.__qualname__
    copy.__dict__.update(f.__dict__)
    for cell in new:
        try:
            copies[id(cell)].cell_contents = frozen(cell.cell_contents, copies)
        except ValueError:  # not bound yet
            continue
    return copy
