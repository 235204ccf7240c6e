"""What a function reads otherwise than through its arguments: read anew at each call.

Looked into are cells of functions, globals that their code names, defaults, partials, methods,
modules, and what holds any of these. Tensors are inputs of the graph; plain values count by value,
other objects by identity. What is not reached so is a constant of the graph.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from functx._lines import is_internal

_PLAIN = {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}


class Cache(dict[Any, Any]):
    """What is known of a function, which is no part of it."""


class State:
    """The tensors that a function reads, each once, and what else of it belongs to a signature."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: list[Tensor] = []
        self.key: list[Any] = []
        self.known: list[Any] = []  # by identity: a key holds as long as these live
        self.held: list[Any] = []  # all that was looked at
        seen: dict[int, int] = {}
        todo = [*roots][::-1]
        while todo:
            x = todo.pop()
            kind = type(x)
            if kind in _PLAIN:
                self.key += kind, x  # (2 == 2.0)
                continue
            number = seen.setdefault(id(x), len(seen))
            if number < len(self.held):
                self.key.append(number)
                continue
            self.held.append(x)
            if isinstance(x, Tensor):
                self.tensors.append(x)
            inside = _inside(x)
            if inside is None:
                self.known.append(x)
            self.key += kind, id(x) if inside is None else len(inside)
            todo += reversed(inside or ())


def reached(root: Any) -> list[Any]:
    """Everything that is looked into, or part of a signature, by identity."""
    return State([root]).held


def _inside(x: Any) -> Sequence[Any] | None:
    """What is looked at of an object; ``None`` where it is known by identity."""
    kind = type(x)
    if isinstance(x, Tensor):
        return ()
    if kind is types.FunctionType:
        if is_internal(x.__code__.co_filename) and not x.__closure__:
            return (x.__code__,)
        return x.__code__, *(value for _, value in variables(x))
    if kind is types.MethodType:
        return x.__func__, x.__self__
    if kind is functools.partial:
        return x.func, x.args, x.keywords
    if isinstance(x, (list, tuple)):
        return x
    if isinstance(x, dict):  # but not what functx knows of a function, in `Cache` say
        return () if kind.__module__.startswith("functx.") else (*x, *x.values())
    if isinstance(x, (type, types.ModuleType)) or not hasattr(x, "__dict__"):
        return None
    return *vars(x), *(v for v in vars(x).values() if not isinstance(v, dict) or v)  # no hooks


def variables(f: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function, or one that it defines, reads by name: cells, globals; and defaults."""
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        with suppress(ValueError):  # not bound yet
            yield name, cell.cell_contents
    around = f.__globals__
    yield from ((name, around[name]) for name in _names(f.__code__) if name in around)
    yield from (("", value) for value in f.__defaults__ or ())
    yield from (f.__kwdefaults__ or {}).items()


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*code.co_names, *(name for c in inner for name in _names(c)))
