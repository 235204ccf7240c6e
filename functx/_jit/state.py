"""What a function reads otherwise than through its arguments: read anew at each call.

Looked into are the cells of functions, the globals that their code names, defaults, partials, bound
methods, modules, and lists, tuples, dicts and instances that hold any of these. Tensors are inputs
of the graph. Everything else is part of the signature: plain values by value, other objects by
identity. What is not reached so is a constant of the graph.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_LIBRARIES = ("torch", "functx", "numpy", "builtins", "functools", "math", "typing", "jax")


class State:
    """The tensors that a function reads, each once, and what else of it belongs to a signature."""

    def __init__(self, function: Any) -> None:
        self.tensors: list[Tensor] = []
        self.key: list[Any] = []
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # so that ids stay what they are
        todo = [iter((function,))]
        while todo:
            for x in todo[-1]:
                if (inner := self._look(x)) is not None:
                    todo.append(inner)
                    break
            else:
                todo.pop()

    def _look(self, x: Any) -> Iterator[Any] | None:
        """Note what ``x`` is; returns what is inside of it."""
        kind = type(x)
        if kind in _PLAIN:
            self.key.append(x)
            return None
        number = self._seen.get(id(x))
        self.key.append(kind if number is None else number)
        if number is not None:
            return None
        self._seen[id(x)] = len(self._seen)
        self._held.append(x)
        if isinstance(x, Tensor):
            self.tensors.append(x)
            return None
        return self._inside(x, kind)

    def _inside(self, x: Any, kind: type) -> Iterator[Any] | None:
        if kind is types.FunctionType:
            self.key.append(x.__code__)
            if _of_library(x.__module__) and not x.__closure__:
                return None
            return iter((*_cells(x), *_globals(x), x.__defaults__, x.__kwdefaults__))
        if kind is types.MethodType:
            return iter((x.__func__, x.__self__))
        if kind is functools.partial:
            return iter((x.func, x.args, x.keywords))
        if isinstance(x, (list, tuple)):
            self.key.append(len(x))
            return iter(x)
        if isinstance(x, dict):
            return iter([part for item in x.items() for part in item])
        if isinstance(x, (type, types.ModuleType)) or not hasattr(x, "__dict__"):
            self.key.append(id(x))
            return None
        if _of_library(kind.__module__) and not isinstance(x, nn.Module) and not callable(x):
            self.key.append(id(x))
            return None
        return iter((vars(x),))


def _of_library(module: Any) -> bool:
    return str(module).split(".")[0] in _LIBRARIES


def _cells(f: Any) -> Iterator[Any]:
    for cell in f.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            yield None


def _globals(f: Any) -> Iterator[Any]:
    """The globals that a function's code names, and the code of functions that it defines."""
    todo = [f.__code__]
    while todo:
        code = todo.pop()
        todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            value = f.__globals__.get(name)
            if not isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)):
                yield value
