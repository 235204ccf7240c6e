"""Hooks of a replay are bound to the variables that those of the forward are bound to.

NOTE [what hooks are bound to]
The tape of a forward holds the hooks that were hung there, and these read and write the variables
that they close over when they are called: a counter, a factor, what is to hold a gradient. The
hooks of a replay are made anew. They would read what their body bound in the replay, and write to
what nobody reads. So they are given the variables of the hooks of the forward, which the region
holds as a tape would; and their defaults, and arguments of a ``functools.partial``. But only those
with nothing in them but numbers and the like, and tensors from outside: others are the replay's.

So it is with what a custom Function keeps for its backward: functions, containers and objects.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from functx._remat._arguments import SCALARS
from functx._remat._past_torch import is_the_users
from functx._remat._slots import slots_of

_MANY, _DEPTH = 256, 4
_ABSENT = object()
_DICTS, _LISTS = (dict, defaultdict, OrderedDict, Counter), (list, set, deque)
_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)  # ``log.append``
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, *_IN_C)


def nothing(t: torch.Tensor) -> bool:
    """Tensors are never from outside."""
    return False


class Bound:
    """What a hook of a forward is bound to.

    Args:
        f: the hook, or a function that it is bound to.
        outside: tells whether a tensor is from outside of the region.
        depth: how far to look for functions.
    """

    def __init__(
        self, f: Any, outside: Callable[[torch.Tensor], bool] = nothing, depth: int = _DEPTH
    ) -> None:
        is_function = isinstance(f, FUNCTIONS)
        self._name: str = getattr(f if is_function else type(f), "__qualname__", "a partial")
        self._object = None if is_function or not _is_plain(f, outside) else f
        self._code, self._like = _code_of(f), _code_of(inspect.unwrap(f) if is_function else f)
        self._itself = weakref.ref(f) if isinstance(f, types.FunctionType) else None
        own = f.__dict__ if isinstance(f, types.FunctionType) else None
        self._attributes = own if own is not None and _is_plain(own, outside) else None
        self._fixed: dict[Any, Any] = {}
        self._cells: dict[Any, types.CellType] = {}
        self._inside: dict[Any, Bound] = {}
        for key, x in _bindings(f):
            content = _content(x) if isinstance(x, types.CellType) else x
            if isinstance(content, FUNCTIONS):
                if depth:
                    self._inside[key] = Bound(content, outside, depth - 1)
            elif _is_plain(content, outside):
                if isinstance(x, types.CellType):
                    self._cells[key] = x
                else:
                    self._fixed[key] = x

    def __str__(self) -> str:
        return self._name

    def is_like(self, other: Bound) -> bool:
        """Whether that is one of the same code."""
        return bool(self._like == other._like)

    def become(self, other: Bound) -> None:
        """It is bound to the same."""
        self.__dict__.update(other.__dict__)

    def again(self, f: Any) -> Any:
        """``f``, of a replay, bound to the same."""
        if (self._itself is not None and self._itself() is f) or _code_of(f) != self._code:
            return f
        if self._object is not None:
            return self._object
        new: dict[Any, Any] = {**self._cells, **self._fixed}
        for key, x in _bindings(f):
            if key in self._inside and key not in new:
                content = _content(x) if isinstance(x, types.CellType) else x
                again = self._inside[key].again(content)
                if again is not content:
                    new[key] = types.CellType(again) if isinstance(x, types.CellType) else again
        if not new and self._attributes is None:
            return f
        again = _with(f, new)
        if self._attributes is not None:
            again.__dict__ = self._attributes
        return again


def _code_of(f: Any) -> Any:
    if isinstance(f, functools.partial):
        return _code_of(f.func)
    if isinstance(f, _IN_C):
        return f.__qualname__
    return getattr(f, "__code__", type(f))  # of a method, that of its function


def _bindings(f: Any) -> Iterator[tuple[Any, Any]]:
    """What a function is bound to: cells by name, and values by place."""
    if isinstance(f, functools.partial):
        yield "func", f.func
        yield from enumerate(f.args)
        yield from ((("named", name), x) for name, x in f.keywords.items())
    elif isinstance(f, types.MethodType):
        yield "func", f.__func__
        yield "self", f.__self__
    elif isinstance(f, _IN_C):
        if f.__self__ is not None:
            yield "self", f.__self__
    elif isinstance(f, types.FunctionType):
        yield from zip(f.__code__.co_freevars, f.__closure__ or ())
        yield from enumerate(f.__defaults__ or ())
        yield from ((("named", name), x) for name, x in (f.__kwdefaults__ or {}).items())


def _with(f: Any, new: dict[Any, Any]) -> Any:
    """``f``, bound to others."""
    if isinstance(f, functools.partial):
        args = [new.get(i, x) for i, x in enumerate(f.args)]
        named = {name: new.get(("named", name), x) for name, x in f.keywords.items()}
        return type(f)(new.get("func", f.func), *args, **named)
    if isinstance(f, _IN_C):
        return getattr(new["self"], f.__name__)
    if isinstance(f, types.MethodType):
        return types.MethodType(new.get("func", f.__func__), new.get("self", f.__self__))
    cells = zip(f.__code__.co_freevars, f.__closure__ or ())
    closure = tuple(new.get(name, cell) for name, cell in cells) if f.__closure__ else None
    defaults = tuple(new.get(i, x) for i, x in enumerate(f.__defaults__ or ())) or None
    g = types.FunctionType(f.__code__, f.__globals__, f.__name__, defaults, closure)
    if f.__kwdefaults__:
        g.__kwdefaults__ = {k: new.get(("named", k), x) for k, x in f.__kwdefaults__.items()}
    return functools.update_wrapper(g, f, updated=("__dict__",))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is bound yet
        return _ABSENT


def _is_plain(x: Any, outside: Callable[[torch.Tensor], bool], depth: int = _DEPTH) -> bool:
    """Whether that is a number or the like, or nothing but such things are in there."""
    if x is _ABSENT or isinstance(x, SCALARS):
        return True
    if isinstance(x, torch.Tensor):
        return outside(x)
    inside = _inside(x)
    if inside is None or depth == 0 or len(inside) > _MANY:
        return False
    return all(_is_plain(one, outside, depth - 1) for one in inside.values())


def _inside(x: Any) -> dict[Any, Any] | None:
    """What is in a container of Python's, or in the attributes of an object of the user's."""
    if type(x) in _DICTS:
        return x
    if type(x) in _LISTS or isinstance(x, tuple):
        return dict(enumerate(x))
    cls = type(x)
    if not (is_the_users(cls.__module__) and all(c.__flags__ & _HEAP for c in cls.__mro__[:-1])):
        return None
    if isinstance(x, (*FUNCTIONS, type, torch.nn.Module)):
        return None
    own, slots = getattr(x, "__dict__", None), slots_of(cls)
    if own is None and not slots:  # of a library in C++
        return None
    found = dict(own or {})
    for name in slots:
        with suppress(AttributeError):
            found[name] = object.__getattribute__(x, name)
    return found


_HEAP = 1 << 9  # of a class that is written in Python
