"""Closure cells as they were at the call (rule 1): names bound again must not change a replay.

A replay calls a copy of the function, with cells of its own. Nor may a node hold the caller's,
which may come to hold the region's results: ``x = remat(lambda t: x + t)(y)`` would be a cycle
through C++ that nothing collects. Copied are the function, functions that it closes over, partials
and bound methods; nothing else of Python's is looked into (rule 5).
"""

from __future__ import annotations

import functools
import types
from contextlib import suppress
from typing import Any


class Wrapper:
    """What calls a ``function`` of the user's, whose cells are its own, with ``options``."""

    def __init__(self, function: Any, options: Any) -> None:
        self.function, self.options = function, options


def frozen(f: Any) -> Any:
    """A copy of ``f`` whose cells nobody can bind anew."""
    kind = type(f)
    if kind is types.FunctionType and f.__closure__ is None:
        return f
    return _frozen(f, {})


def _frozen(x: Any, copies: dict[int, Any]) -> Any:
    """A copy of a function; anything else itself. ``copies`` are by the id of what they are of."""
    kind = type(x)
    if kind is types.FunctionType:
        return x if x.__closure__ is None else _copied(x, copies)
    if kind is functools.partial:
        inner = _frozen(x.func, copies)
        return x if inner is x.func else functools.partial(inner, *x.args, **x.keywords)
    if kind is types.MethodType:
        inner = _frozen(x.__func__, copies)
        return x if inner is x.__func__ else types.MethodType(inner, x.__self__)
    if issubclass(kind, Wrapper):
        inner = _frozen(x.function, copies)
        return x if inner is x.function else type(x)(inner, x.options)
    return x


def _copied(f: types.FunctionType, copies: dict[int, Any]) -> Any:
    """A function with cells of its own."""
    if id(f) in copies:
        return copies[id(f)]
    assert f.__closure__ is not None
    new = [c for c in f.__closure__ if id(c) not in copies]
    for cell in new:
        copies[id(cell)] = types.CellType()
    closure = tuple([copies[id(cell)] for cell in f.__closure__])
    copy = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, closure)
    copies[id(f)] = f  # what a function knows itself by, ``type(self).forward is forward``
    copy.__kwdefaults__, copy.__qualname__ = f.__kwdefaults__, f.__qualname__
    copy.__dict__.update(f.__dict__)
    for cell in new:
        with suppress(ValueError):  # not bound yet
            copies[id(cell)].cell_contents = _frozen(cell.cell_contents, copies)
    copies[id(f)] = copy
    return copy
