"""What the tensors that a function is given, or closes over, are called in its code."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from functx import _tree

# Deeper than that, and in longer lists, closures are not searched for names.
_DEEPEST, _LONGEST = 6, 1000

Label = tuple[str, str]
"""The kind ("argument", "parameter", "buffer", "constant") and the name."""


def labels(f: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, Label]]:
    """The tensors that a call reaches, each with what it is called; the first name is the best."""
    for name, value in _named_arguments(f, args, kwargs):
        yield from _inside(value, name, "argument")
    yield from _reached(f, "", 0, set())


def _named_arguments(f: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    called = f.forward if isinstance(f, nn.Module) else f
    try:
        bound = inspect.signature(called).bind(*args, **kwargs)
        parameters = bound.signature.parameters
    except (TypeError, ValueError):  # builtins, or a call that will raise by itself
        yield from ((str(i), x) for i, x in enumerate(args))
        yield from kwargs.items()
        return
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _inside(value: Any, name: str, kind: str) -> Iterator[tuple[Tensor, Label]]:
    if isinstance(value, Tensor):
        yield value, (kind, name)
    elif isinstance(value, nn.Module):
        prefix = f"{name}." if name else ""
        yield from ((t, ("parameter", prefix + path)) for path, t in value.named_parameters())
        yield from ((t, ("buffer", prefix + path)) for path, t in value.named_buffers())
    else:
        leaves = _tree.leaves(value)
        if len(leaves) == 1 and leaves[0] is value:
            return
        for path, leaf in zip(_tree.paths(value), leaves):
            if isinstance(leaf, (Tensor, nn.Module)):
                yield from _inside(leaf, name + path, kind)


def _reached(f: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[Tensor, Label]]:
    """What a function closes over, by the names of its variables."""
    if id(f) in seen or depth > _DEEPEST:
        return
    seen.add(id(f))
    if isinstance(f, (Tensor, nn.Module)):
        yield from _inside(f, name, "constant")
    elif isinstance(f, functools.partial):
        for part in (f.func, f.args, f.keywords):
            yield from _reached(part, name, depth, seen)
    elif isinstance(f, types.MethodType):
        yield from _reached(f.__func__, name, depth, seen)
        owner = f.__self__
        yield from _reached(owner, "self" if depth == 0 else name, depth + 1, seen)
        if not isinstance(owner, (nn.Module, type)):
            for key, value in getattr(owner, "__dict__", {}).items():
                yield from _reached(value, f"self.{key}", depth + 1, seen)
    elif isinstance(f, types.FunctionType):
        for variable, value in _variables(f):
            yield from _reached(value, variable, depth + 1, seen)
    elif type(f) in (list, tuple, dict):
        if len(f) <= _LONGEST:
            for key, value in f.items() if type(f) is dict else enumerate(f):
                yield from _reached(value, f"{name}[{key!r}]" if name else "", depth + 1, seen)
    elif callable(f) and not isinstance(f, type):
        call = type(f).__call__
        if isinstance(call, types.FunctionType):
            yield from _reached(types.MethodType(call, f), name, depth, seen)


def _variables(f: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for variable, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        try:
            yield variable, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for variable in f.__code__.co_names:
        value = f.__globals__.get(variable)
        if value is not None and not isinstance(value, (types.ModuleType, type)):
            yield variable, value
    for default in f.__defaults__ or ():
        yield "", default
