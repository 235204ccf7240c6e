"""Code of the user's that runs inside of one operation: seen as the body's own.

NOTE [code inside an operation]
The mode that shows a region its operations is not active inside of one. But some run code of the
user's there: a function of torch's that is written in Python calls one that it is given
(``distance_function``), and any function calls the ``__torch_function__`` of an object that is no
tensor. What that reads is to be captured, recorded and compared as what the body reads. So the mode
is entered again around it. The first kind is an operation on the record, followed by those that it
runs, each with its own steps; the second is none, as all that is done is what the user's code does.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from functx._remat._tapes import PLAIN
from functx._remat._whose import NOT_THE_USERS, module_of_class


class _Overriding(dict[Any, bool]):
    """Whether one of the types of arguments that have ``__torch_function__`` is no tensor's."""

    def __missing__(self, types: Any) -> bool:
        if len(self) >= _MANY:
            self.clear()
        found = self[types] = not all(
            issubclass(kind, Tensor) or NOT_THE_USERS[module_of_class(kind)] for kind in types
        )
        return found


_MANY = 1024
_CALLED = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType),
    *(functools.partial, nn.Module),
)
OVERRIDING = _Overriding()


def overridden(func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
    """What those arguments make of a call.

    Raises:
        TypeError: nothing, as torch says then.
    """
    among: list[Any] = [*args, *kwargs.values()]
    found: dict[type, Any] = {}
    while among:
        one = among.pop(0)
        if isinstance(one, (list, tuple)):
            among += one
        found.setdefault(type(one), one)
    for kind in types:
        if kind not in PLAIN and kind in found:
            out = found[kind].__torch_function__(func, types, args, kwargs)
            if out is not NotImplemented:
                return out
    raise TypeError(
        f"Multiple dispatch failed for {torch.overrides.resolve_name(func)!r}; all "
        f"__torch_function__ handlers returned NotImplemented: {[*types]}"
    )


def is_given_code(args: Any, kwargs: Any) -> bool:
    """Whether a function is given what it may call."""
    return any(map(_may_be_called, (*args, *kwargs.values())))


def _may_be_called(a: Any) -> bool:
    if isinstance(a, _CALLED):
        return True
    # What is of torch itself may be something else as well: the sum that `all_reduce` is told of.
    kind = type(a)
    return (
        callable(a)
        and not isinstance(a, (Tensor, type))
        and not NOT_THE_USERS[module_of_class(kind)]
    )


def seen_again(args: Any, kwargs: Any, enter: Callable[[], Any]) -> tuple[Any, Any]:
    """Arguments, of which those that may be called are called within ``enter()``."""
    again = [_Seen(a, enter) if _may_be_called(a) else a for a in (*args, *kwargs.values())]
    return again[: len(args)], dict(zip(kwargs, again[len(args) :]))


class _Seen:
    """A function of the user's, called where a mode is active."""

    def __init__(self, function: Any, enter: Callable[[], Any]) -> None:
        self._function = function
        self._enter = enter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._enter():
            return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)
