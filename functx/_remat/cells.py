"""Closure cells as they were at the call (rule 1): names bound again must not change a replay.

A replay calls a copy of the function, with cells of its own. Nor may a node hold the caller's,
which may come to hold the region's results: ``x = remat(lambda t: x + t)(y)`` would be a cycle
through C++ that nothing collects. Copied are the function, functions that it closes over, partials
and bound methods; nothing else of Python's is looked into (rule 5).

A replay may bind a cell anew (``nonlocal n; n += 1``), so each begins with the cells as they were.
A function that calls itself calls the copy. But a method's own name is the method, as its class has
it: layers of transformers ask ``type(self).forward is forward_with_checkpointing``.

On the way the function's identity is noted, which plans are found by (NOTE [listen once]): its
code, and what it closes over or is a method of, but for tensors and floating point numbers.
"""

from __future__ import annotations

import functools
import types
from typing import Any
from weakref import ref

from torch import Tensor

from functx._core import is_of
from functx._remat.calls import ATOMS, is_plain


class Wrapper:
    """What calls a ``function`` of the user's, whose cells are its own, with ``options``."""

    def __init__(self, function: Any, options: Any) -> None:
        self.function, self.options = function, options


class Cells:
    """The cells of a copy, and what they held at the call."""

    def __init__(self, copies: dict[int, Any]) -> None:
        cells = [c for c in copies.values() if type(c) is types.CellType]
        self._held = [(cell, contents_of(cell)) for cell in cells]

    def put(self) -> None:
        """Let the cells hold what they held: a replay begins."""
        for cell, contents in self._held:
            if contents_of(cell) is contents:
                continue
            if contents is UNBOUND:
                del cell.cell_contents
            else:
                cell.cell_contents = contents


UNBOUND = object()


def contents_of(cell: types.CellType) -> Any:
    """What a cell holds; `UNBOUND` if its name is not bound yet, or has been deleted."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNBOUND


def frozen(f: Any) -> tuple[Any, Any, Cells]:
    """A copy of ``f`` with cells of its own, its identity, or ``None``, and these cells."""
    key: list[Any] = []
    copies: dict[int, Any] = {}
    copy = _frozen(f, key, copies)
    return copy, None if None in key else tuple(key), Cells(copies)


def _frozen(x: Any, key: list[Any], copies: dict[int, Any], method: bool = False) -> Any:
    """A copy of a function; anything else itself. ``copies`` are by the id of what they are of."""
    kind = type(x)
    if kind is types.FunctionType:
        return _copied(x, key, copies, method)
    if kind is functools.partial:
        inner = _frozen(x.func, key, copies, bool(x.args) and _is_method(x.func, x.args[0]))
        for given in (*x.args, *x.keywords, *x.keywords.values()):
            _frozen(given, key, copies)
        return x if inner is x.func else functools.partial(inner, *x.args, **x.keywords)
    if kind is types.MethodType:
        inner = _frozen(x.__func__, key, copies, method=True)
        key.append(_reference(x.__self__))
        return x if inner is x.__func__ else types.MethodType(inner, x.__self__)
    if issubclass(kind, Wrapper):
        inner = _frozen(x.function, key, copies)
        return x if inner is x.function else type(x)(inner, x.options)
    if kind is types.BuiltinFunctionType:  # a function of C, or a method: ``x.mul`` holds ``x``
        key += x.__qualname__, _part(x.__self__)
    else:
        key.append(_part(x))
    return x


def _copied(f: types.FunctionType, key: list[Any], copies: dict[int, Any], method: bool) -> Any:
    """A function, perhaps of a method, with cells of its own; itself if it has none."""
    key.append(f.__code__)
    if id(f) in copies:
        return copies[id(f)]
    for given in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
        _frozen(given, key, copies)
    if f.__closure__ is None:
        return f
    new = [c for c in f.__closure__ if id(c) not in copies]
    for cell in new:
        copies[id(cell)] = types.CellType()
    closure = tuple(copies[id(cell)] for cell in f.__closure__)
    copy = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, closure)
    copies[id(f)] = f if method else copy  # what it knows itself by
    copy.__kwdefaults__, copy.__qualname__ = f.__kwdefaults__, f.__qualname__
    copy.__dict__.update(f.__dict__)
    for cell in new:
        if (contents := contents_of(cell)) is UNBOUND:
            key.append(None)
        else:
            copies[id(cell)].cell_contents = _frozen(contents, key, copies)
    copies[id(f)] = copy
    return copy


def _is_method(f: Any, instance: Any) -> bool:
    """Whether the class of an instance has this function: ``partial(type(x).forward, x)``."""
    name: str = getattr(f, "__name__", "")
    return any(vars(base).get(name) is f for base in type(instance).__mro__)


def _part(x: Any) -> Any:
    """What an object is in an identity, which holds no tensor and no object of the program's."""
    kind = type(x)
    if kind is float or issubclass(kind, Tensor):
        return kind
    if (type(kind) is type and kind in ATOMS) or (kind is tuple and is_plain(x)):
        return kind, x
    return _reference(x)


def _reference(x: Any) -> Any:
    """A weak reference as a part of a key; ``None`` for a container or an object without hash."""
    if is_of(x, (list, tuple, dict, set, frozenset)):  # ``__hash__`` of a class may load its items
        return None
    try:
        hash(x)
        return ref(x)
    except Exception:  # ``__hash__`` of a class may raise any error
        return None
