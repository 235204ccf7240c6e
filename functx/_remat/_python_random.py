"""Python's and numpy's global generators, where a function's code names them.

Reading their state at every call would cost more than most regions; so it is done where code that
the function reaches (itself, functions it closes over, the methods of its module) names ``random``
or ``numpy``, or where the caller asks for it.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from functx import _torch_modules
from functx._remat._code_names import OfGlobals, names_in

Generator = tuple[str, Callable[[], Any], Callable[[Any], Any]]


def reachable(f: Any, preserve: bool | str) -> list[Generator]:
    """The global generators whose state a region must keep: name, how to read it, how to set it."""
    named = {*_GENERATORS} if preserve == "all" else _named_by(f)
    found: list[Generator] = []
    if "random" in named:
        found.append(("random", random.getstate, random.setstate))
    if "numpy" in named and "numpy" in sys.modules:
        np = sys.modules["numpy"]
        found.append(("numpy", np.random.get_state, np.random.set_state))
    return found


_GENERATORS = frozenset({"random", "numpy"})
_BUILT_IN = frozenset({bool, int, float, str, tuple, list, dict, set, frozenset})


def _top_of(value: Any) -> str:
    """The package that a value is, or is of; ``""`` where that is not known."""
    module = value.__name__ if isinstance(value, types.ModuleType) else None
    module = module or getattr(value, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def _named_by(f: Any) -> set[str]:
    """Those of `_GENERATORS` that the code of functions names.

    Of all that ``f`` reaches through globals, cells, partials, methods, and submodules.
    """
    named: set[str] = set()
    if isinstance(f, types.BuiltinFunctionType):
        return named
    seen: set[int] = set()
    stack = [f]
    while stack:
        f = stack.pop()
        if id(f) in seen:
            continue
        seen.add(id(f))
        if isinstance(f, types.FunctionType):
            values, (found, functions) = _of_globals(f)
            named |= found
            stack += [values[i] for i in functions]
            for cell in f.__closure__ or ():
                try:
                    contents = cell.cell_contents
                except ValueError:
                    continue
                if callable(contents):
                    stack.append(contents)
        elif isinstance(f, nn.Module):
            for cls in {*map(type, _torch_modules.modules_of(f))}:
                forward = _torch_modules.forward_of(cls, _NOT_THE_USERS)
                if forward is not None:
                    stack += _methods_of(cls, forward)
        elif isinstance(f, types.MethodType):
            stack += (f.__func__, f.__self__)
            if isinstance(f.__self__, nn.Module):  # whose class may have another forward
                stack += _methods_of(type(f.__self__), f.__func__)
        elif isinstance(f, functools.partial):
            stack += (f.func, *f.args, *f.keywords.values())
    return named


def _among(names: Sequence[str], values: Sequence[Any]) -> tuple[set[str], list[int]]:
    """The generators that some globals are of, and which globals are functions of the user's."""
    named: set[str] = set()
    functions = []
    for i, (name, value) in enumerate(zip(names, values)):
        if value is None:  # an attribute, mostly; or imported inside the function
            if name in _GENERATORS:
                named.add(name)
            continue
        kind = type(value)
        if kind not in _BUILT_IN and (top := _top_of(value)) in _GENERATORS:
            named.add(top)
        if kind is types.FunctionType and not _not_the_users(value):
            functions.append(i)
    return named, functions


_of_globals = OfGlobals(_among)

# By class and the id of a forward, that forward and the methods that it calls: found once. A class
# may have several: a module made of it by remat has its own, and calls that of the original.
_methods: weakref.WeakKeyDictionary[type, dict[int, tuple[Any, ...]]]
_methods = weakref.WeakKeyDictionary()


def _methods_of(cls: type, forward: Any) -> tuple[Any, ...]:
    """``forward``, and the methods of a class that it names, and those name."""
    of_class = _methods.get(cls)
    if of_class is None:
        of_class = _methods[cls] = {}
    known = of_class.get(id(forward))
    if known is None:
        found = [forward]
        for f in found:  # which grows
            if not isinstance(f, types.FunctionType):
                continue
            inside = [c.cell_contents for c in f.__closure__ or () if c != _EMPTY]  # decorated
            for name in names_in(f.__code__)[0]:
                method = inspect.getattr_static(cls, name, None)
                if isinstance(method, property):
                    method = method.fget
                inside.append(getattr(method, "__func__", method))
            found += [
                m
                for m in inside
                if isinstance(m, types.FunctionType) and not _not_the_users(m) and m not in found
            ]
        if len(of_class) >= _FEW:  # set anew on the class at every step, perhaps
            of_class.clear()
        known = of_class[id(forward)] = (*found,)
    return known


_EMPTY = types.CellType()
_FEW = 16
_NOT_THE_USERS = ("torch", "functx")


def _not_the_users(f: types.FunctionType) -> bool:
    return (f.__module__ or "").partition(".")[0] in _NOT_THE_USERS
