"""Find the names that a function's code uses for its arguments and for tensors it closes over."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from functx._core import attributes, is_of, tree, variables

DEEPEST, LONGEST = 8, 1000  # closures are not searched more deeply, or in longer lists
Label = tuple[str, str]  # the kind ("argument", "parameter", "buffer", "constant") and the name


def labels(f: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, Label]]:
    """The tensors that a call can use, each with a label. If one comes twice, use the first."""
    for name, value in _arguments(f, args, kwargs):
        yield from _inside(value, name, "argument")
    yield from _closed_over(f, "", 0, set())


def _arguments(f: Any, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    try:
        signature = inspect.signature(f.forward if isinstance(f, nn.Module) else f)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):  # a builtin, or wrong arguments, for which the call will raise
        return [*zip(map(str, range(len(args))), args), *kwargs.items()]
    several = [n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
    named = [(name, x) for name, x in bound.arguments.items() if name not in several]
    return [*named, *bound.kwargs.items()]


def _inside(value: Any, name: str, kind: str) -> Iterator[tuple[Tensor, Label]]:
    if is_of(value, Tensor):
        yield value, (kind, name)
    elif is_of(value, nn.Module):
        prefix = f"{name}." if name else ""
        yield from ((t, ("parameter", prefix + path)) for path, t in value.named_parameters())
        yield from ((t, ("buffer", prefix + path)) for path, t in value.named_buffers())
    else:
        for path, leaf in zip(tree.paths(value), tree.leaves(value)):
            if leaf is not value:
                yield from _inside(leaf, name + path, kind)


def _closed_over(f: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[Tensor, Label]]:
    """The tensors that a function closes over, by the names of its variables."""
    if id(f) in seen or depth > DEEPEST:
        return
    seen.add(id(f))
    parts: list[tuple[str, Any]] = []
    if is_of(f, (Tensor, nn.Module)):
        yield from _inside(f, name, "constant")
    elif is_of(f, functools.partial):
        parts = [(name, f.func), (name, f.args), (name, f.keywords)]
    elif is_of(f, types.MethodType):
        parts = [(name, f.__func__), (name or "self", f.__self__)]
        if not is_of(f.__self__, (nn.Module, type)):
            found = attributes(f.__self__) or {}
            parts += [(f"self.{k}", v) for k, v in found.items() if type(k) is str]
    elif is_of(f, types.FunctionType):
        parts = [*variables(f)]
    elif any(type(f) is kind for kind in (list, tuple, dict)) and len(f) <= LONGEST:
        items = f.items() if type(f) is dict else enumerate(f)
        parts = [(f"{name}[{_shown(key)}]" if name else "", value) for key, value in items]
    elif isinstance(call := getattr(type(f), "__call__", None), types.FunctionType):  # noqa: B004
        parts = [(name, types.MethodType(call, f))]
    for part, value in parts:
        if not is_of(value, (types.ModuleType, type)):
            yield from _closed_over(value, part, depth + 1, seen)


def _shown(key: Any) -> str:
    """A key as code. For other objects the name of the class, since ``__repr__`` may raise."""
    return repr(key) if type(key) in (str, int, bool, float, type(None)) else type(key).__name__
