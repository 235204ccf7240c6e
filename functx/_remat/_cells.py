"""Functions as they were when they were called: copies, whose cells hold what they held then.

NOTE [late binding]
Python reads a closed-over variable when it runs. A replay must see what the forward saw, so it runs
a copy of the function whose cells hold what they held at the call; functions that they lead to are
copied likewise. A copy's writes to its cells (``nonlocal``) stay there: they count once.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from functx._errors import RematError
from functx._remat._containers import MUTABLE, Copies, copied
from functx._remat._depth import is_nested
from functx._remat._really_held import OF_OWNERS

_EMPTY = object()
_NOTHING: Mapping[int, Any] = MappingProxyType({})

Cells = dict[int, tuple[Any, Any]]


def snapshot(f: Any) -> Cells:
    """The contents of every cell that ``f`` can read. ``NOTE [late binding]``."""
    cells: Cells = {}
    if type(f) is types.BuiltinFunctionType or (
        type(f) is types.FunctionType and f.__closure__ is None
    ):
        return cells
    stack = [f]
    while stack:
        kind = type(f := stack.pop())
        if issubclass(kind, functools.partial):
            stack += (f.func, *f.args, *f.keywords.values())
        elif kind is types.MethodType:
            stack.append(f.__func__)
        elif kind is types.FunctionType:
            for cell, contents in _cells_of(f):
                if id(cell) not in cells:
                    cells[id(cell)] = (cell, contents)
                    stack.append(contents)
    return cells


def _cells_of(f: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    """The cells of a function, with what they hold."""
    for cell in f.__closure__ or ():
        try:
            yield cell, cell.cell_contents
        except ValueError:  # not bound yet
            yield cell, _EMPTY


def rebound(
    f: Any,
    cells: Cells,
    *,
    marked: Collection[int] = (),
    held: Collection[int] = (),
    copies: Copies | None = None,
    tensors: Mapping[int, Any] = _NOTHING,
    before: Mapping[int, Any] = _NOTHING,
) -> Any:
    """``f`` with its cells as they were. ``NOTE [late binding]``.

    Args:
        f: the function.
        cells: what they held.
        marked: ids of containers that are to be copied.
        held: ids of tensors that no container is to hold.
        copies: is given the containers that were copied: those, and all that lead to one.
        tensors: what is there instead of some tensors, or of others, by id.
        before: by the id of a container, what it held before the call, if that is something else.
    """
    if not (cells or marked or held or tensors or before):
        return f
    copies = {} if copies is None else copies
    try:
        return _Rebinder(cells, marked, held, copies, tensors, before).rebind(f)
    except RecursionError:
        if is_nested():  # the outermost region says how deep
            raise
        raise RematError(
            f"remat: {getattr(f, '__qualname__', f)!r} closes over functions that close "
            f"over others, {_depth(f)} deep, which takes more of Python's stack than there is "
            f"(sys.getrecursionlimit() is {sys.getrecursionlimit()}). Keep them in a list."
        ) from None


def _depth(f: Any) -> int:
    """How deep functions are nested in cells."""
    depth, level = 0, [f]
    seen: set[int] = set()
    while level:
        depth += 1
        found = [c for g in level for _, c in _cells_of(g) if id(c) not in seen]
        level = [g for g in found if isinstance(g, types.FunctionType)]
        seen.update(map(id, level))
    return depth


class _Rebinder:
    def __init__(
        self,
        cells: Cells,
        marked: Collection[int],
        held: Collection[int],
        copies: Copies,
        tensors: Mapping[int, Any],
        before: Mapping[int, Any],
    ) -> None:
        self._before = before
        self._cells = cells
        self._tensors = tensors
        self._marked = marked
        self._held = held
        self._containers = copies
        self._copies: dict[int, types.CellType] = {}

    def _container(self, c: Any) -> Any:
        if id(c) in self._tensors:
            return self._tensors[id(c)]
        if type(c) not in MUTABLE or not (self._marked or self._held or self._before):
            return c
        return copied(c, self._marked, self._held, self._containers, self._before)

    def rebind(self, f: Any) -> Any:
        if type(f) in MUTABLE or id(f) in self._tensors:
            return self._container(f)
        if issubclass(type(f), functools.partial):
            return functools.partial(
                self.rebind(f.func),
                *(self.rebind(a) for a in f.args),
                **{k: self.rebind(v) for k, v in f.keywords.items()},
            )
        if type(f) is types.MethodType:
            owner = self._tensors.get(id(f.__self__), f.__self__) if self._tensors else f.__self__
            return types.MethodType(self.rebind(f.__func__), owner)
        if self._tensors and type(f) in OF_OWNERS and id(f.__self__) in self._tensors:
            return getattr(self._tensors[id(f.__self__)], f.__name__)
        if type(f) is not types.FunctionType:
            return f
        n, named = len(f.__defaults__ or ()), f.__kwdefaults__ or {}
        given = (*(f.__defaults__ or ()), *named.values())
        defaults = [self._container(x) for x in given]
        if not f.__closure__ and all(new is x for new, x in zip(defaults, given)):
            return f
        closure = f.__closure__ and tuple(map(self._cell, f.__closure__))
        copy = types.FunctionType(f.__code__, f.__globals__, f.__name__, (*defaults[:n],), closure)
        copy.__kwdefaults__ = dict(zip(named, defaults[n:])) or None
        copy.__dict__.update(f.__dict__)
        return copy

    def _cell(self, cell: types.CellType) -> types.CellType:
        copy = self._copies.get(id(cell))
        if copy is None:
            copy = self._copies[id(cell)] = types.CellType()
            # A cell made since the call (none of the recorded ones) is read as it is now.
            _, contents = self._cells.get(id(cell), (cell, _EMPTY))
            if contents is not _EMPTY:
                copy.cell_contents = self.rebind(contents)
        return copy
