"""Python's and numpy's global generators, where a function's code names them.

Reading their state at every call would cost more than most regions; so it is done where code that
the function reaches (itself, functions it closes over, the methods of its module) names ``random``
or ``numpy``, or where the caller asks for it.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Generator = tuple[str, Callable[[], Any], Callable[[Any], Any]]


def reachable(f: Any, preserve: bool | str) -> list[Generator]:
    """The global generators whose state a region must keep: name, how to read it, how to set it."""
    if preserve == "all":
        named = {"random", "numpy"}
    else:
        named = set()
        for function in _functions(f, set()):
            named |= _named(function.__code__, _Globals(function.__globals__))
    found: list[Generator] = []
    if "random" in named:
        found.append(("random", random.getstate, random.setstate))
    if "numpy" in named and "numpy" in sys.modules:
        np = sys.modules["numpy"]
        found.append(("numpy", np.random.get_state, np.random.set_state))
    return found


class _Globals:
    """A function's globals, equal to themselves only: a key for a cache."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def __hash__(self) -> int:
        return id(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Globals) and other.names is self.names


@functools.lru_cache(maxsize=4096)
def _named(code: types.CodeType, scope: _Globals) -> frozenset[str]:
    found = set()
    for name in _names(code):
        value = scope.names.get(name)
        module = value.__name__ if isinstance(value, types.ModuleType) else None
        module = module or getattr(value, "__module__", None)
        top = module.partition(".")[0] if isinstance(module, str) else None
        if value is not None and top in ("random", "numpy"):
            found.add(top)
        if value is None and name in ("random", "numpy"):  # imported inside the function
            found.add(name)
    return frozenset(found)


def _functions(f: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """Functions that ``f`` reaches through cells, partials, methods, and submodules."""
    if id(f) in seen:
        return
    seen.add(id(f))
    if isinstance(f, functools.partial):
        for part in (f.func, *f.args, *f.keywords.values()):
            yield from _functions(part, seen)
    elif isinstance(f, types.MethodType):
        yield from _functions(f.__func__, seen)
        yield from _functions(f.__self__, seen)
    elif isinstance(f, nn.Module):
        for cls in {type(m) for m in f.modules()}:
            forward = cls.forward
            if isinstance(forward, types.FunctionType) and id(forward) not in seen:
                yield from _functions(forward, seen)
    elif isinstance(f, types.FunctionType):
        yield f
        for name in _names(f.__code__):
            value = f.__globals__.get(name)
            if isinstance(value, types.FunctionType) and not _of_torch(value):
                yield from _functions(value, seen)
        for cell in f.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:
                continue
            if callable(contents):
                yield from _functions(contents, seen)


def _of_torch(f: types.FunctionType) -> bool:
    return (f.__module__ or "").partition(".")[0] == "torch"


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that code reads, that of nested functions and comprehensions included."""
    nested = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in nested for name in names))))
