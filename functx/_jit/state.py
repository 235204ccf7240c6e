"""What a function reads otherwise than through its arguments: read anew at each call.

Looked into are the cells of functions, the globals that their code names, defaults, partials, bound
methods, modules, and lists, tuples, dicts and instances that hold any of these. Tensors are inputs
of the graph. Everything else is part of the signature: plain values by value, other objects by
identity. What is not reached so is a constant of the graph.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from functx._lines import is_internal

_PLAIN = {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType)


class Cache(dict[Any, Any]):
    """What is known of a function, which is no part of it."""


class State:
    """The tensors that a function reads, each once, and what else of it belongs to a signature."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.key: list[Any] = []
        self._seen: dict[int, int] = {}
        self.held: list[Any] = []  # all of that, so that ids stay what they are
        for root in roots:
            self._look(root)

    def _look(self, x: Any) -> None:
        """Note what ``x`` is, and what is inside of it."""
        kind, key = type(x), self.key
        if kind in _PLAIN:
            key += kind, x  # (2 == 2.0)
            return
        number = self._seen.setdefault(id(x), len(self._seen))
        if number < len(self.held):
            key.append(number)
            return
        self.held.append(x)
        key.append(kind)
        if isinstance(x, Tensor):
            self.tensors.append(x)
        elif isinstance(x, nn.Module):
            self._look_at_all(v for v in vars(x).values() if v is not None and v != {})
        elif kind is types.FunctionType:
            key.append(x.__code__)
            if x.__closure__ or not is_internal(x.__code__.co_filename):
                self._look_at_all((*_cells(x), *_globals(x)))
                self._look_at_all(x.__defaults__ or ())
                self._look_at_all((x.__kwdefaults__ or {}).values())
        elif kind is types.MethodType:
            self._look_at_all((x.__func__, x.__self__))
        elif kind is functools.partial:
            self._look_at_all((x.func, x.args, x.keywords))
        elif isinstance(x, (list, tuple)):
            key.append(len(x))
            self._look_at_all(x)
        elif isinstance(x, dict):
            if kind.__module__.startswith("functx."):
                return  # what functx knows of a function, in `Cache` say
            self._look_at_all(x)
            self._look_at_all(x.values())
        elif isinstance(x, _OPAQUE) or not hasattr(x, "__dict__"):
            key.append(_Itself(x))
        else:
            self._look_at_all(vars(x).values())

    def _look_at_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._look(value)


def reached(root: Any) -> list[Any]:
    """Everything that is looked into, or part of a signature, by identity."""
    return State([root]).held


class _Itself:
    """An object as a part of a key: equal to itself alone, and held, lest its id comes again."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.x is other.x

    def __hash__(self) -> int:
        return id(self.x)


def _cells(f: Any) -> list[Any]:
    cells = []
    for cell in f.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not bound yet
            cells.append(None)
    return cells


def _globals(f: Any) -> list[Any]:
    """The globals that a function's code names, and the code of functions that it defines."""
    around = f.__globals__
    values = [around[name] for name in _names(f.__code__) if name in around]
    return [v for v in values if not isinstance(v, _OPAQUE)]


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*code.co_names, *(name for c in inner for name in _names(c)))
