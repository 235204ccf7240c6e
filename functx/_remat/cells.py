"""Closure cells as they were at the call (rule 1): names bound again must not change a replay.

A replay calls a copy of the function, with new cells. There is a second reason for this copy. A
node must not hold the cells of the caller, because they may come to hold the results of the region:
``x = remat(lambda t: x + t)(y)`` would be a cycle through C++ that is never collected. functx
copies the function, functions that it closes over, partials and bound methods. It does not look
into other Python objects (rule 5).

A replay may bind a cell again (``nonlocal n; n += 1``), so each replay begins with the contents at
the call. A function that calls itself calls the copy. But within a method, the method's name means
the original, as it is in the class: layers of transformers check
``type(self).forward is forward_with_checkpointing``.
"""

from __future__ import annotations

import functools
import types
from typing import Any


class Wrapper:
    """The base of objects that call a user's ``function`` with ``options``.

    The cells of such a function are copied, too.
    """

    def __init__(self, function: Any, options: Any) -> None:
        self.function, self.options = function, options


class Cells:
    """The cells of a copy, and their contents at the call."""

    def __init__(self, copies: dict[int, Any]) -> None:
        cells = [c for c in copies.values() if type(c) is types.CellType]
        self._held = [(cell, contents_of(cell)) for cell in cells]

    def put(self) -> None:
        """Restore the contents of the cells, before a replay."""
        for cell, contents in self._held:
            if contents_of(cell) is contents:
                continue
            if contents is UNBOUND:
                del cell.cell_contents
            else:
                cell.cell_contents = contents


UNBOUND = object()


def contents_of(cell: types.CellType) -> Any:
    """The contents of a cell; `UNBOUND` if its name is not bound yet, or has been deleted."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNBOUND


def frozen(f: Any) -> tuple[Any, Cells | None]:
    """A copy of ``f`` with new cells, and these cells; ``None`` if it closes over nothing."""
    copies: dict[int, Any] = {}
    copy = _frozen(f, copies)
    return copy, Cells(copies) if copies else None


def _frozen(x: Any, copies: dict[int, Any], method: bool = False) -> Any:
    """A copy of a function; any other object itself. ``copies`` has copies by the original's id."""
    kind = type(x)
    if kind is types.FunctionType:
        return x if x.__closure__ is None else _copied(x, copies, method)
    if kind is functools.partial:
        inner = _frozen(x.func, copies, bool(x.args) and _is_method(x.func, x.args[0]))
        return x if inner is x.func else functools.partial(inner, *x.args, **x.keywords)
    if kind is types.MethodType:
        inner = _frozen(x.__func__, copies, method=True)
        return x if inner is x.__func__ else types.MethodType(inner, x.__self__)
    if issubclass(kind, Wrapper):
        inner = _frozen(x.function, copies)
        return x if inner is x.function else type(x)(inner, x.options)
    return x


def _copied(f: types.FunctionType, copies: dict[int, Any], method: bool) -> Any:
    """A copy of a function with new cells. ``method`` is set for the function of a method."""
    if id(f) in copies:
        return copies[id(f)]
    assert f.__closure__ is not None
    new = [c for c in f.__closure__ if id(c) not in copies]
    for cell in new:
        copies[id(cell)] = types.CellType()
    closure = tuple([copies[id(cell)] for cell in f.__closure__])
    copy = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, closure)
    copies[id(f)] = f if method else copy  # the function that its own name refers to
    copy.__kwdefaults__, copy.__qualname__ = f.__kwdefaults__, f.__qualname__
    copy.__dict__.update(f.__dict__)
    for cell in new:
        if (contents := contents_of(cell)) is not UNBOUND:
            copies[id(cell)].cell_contents = _frozen(contents, copies)
    copies[id(f)] = copy
    return copy


def _is_method(f: Any, instance: Any) -> bool:
    """Whether the class of an instance has this function: ``partial(type(x).forward, x)``."""
    name: str = getattr(f, "__name__", "")
    return any(vars(base).get(name) is f for base in type(instance).__mro__)
