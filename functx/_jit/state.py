"""What a function reads otherwise than through its arguments: read anew at each call.

Looked into are cells of functions, globals that their code names, defaults, partials, methods,
modules, and what holds any of these. Tensors are inputs of the graph; plain values and small arrays
count by value, other objects by identity. What is not reached so is a constant of the graph.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._errors import TracingError
from functx._lines import is_internal

_SMALL = 4096  # bytes of an array whose values count
_SPACES = type, types.ModuleType
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
    kind: Any = type(x)
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
    if isinstance(x, (list, tuple, set, frozenset)):
        return (*x,)
    if kind.__name__ == "ndarray" and kind.__module__ == "numpy" and x.nbytes <= _SMALL:
        return id(x), x.tobytes(), x.shape, str(x.dtype)
    if isinstance(x, dict):  # but not what functx knows of a function, in `Cache` say
        return () if kind.__module__.startswith("functx.") else (*x, *x.values())
    if isinstance(x, (type, types.ModuleType)) or not hasattr(x, "__dict__"):
        return None
    own = (v for v in vars(x).values() if not isinstance(v, dict) or v)  # no hooks
    return *vars(x), *own, *[vars(c).get(name) for c, name in _plain_of(kind)]


@functools.cache
def _plain_of(kind: type) -> list[tuple[type, str]]:
    """The plain values and tensors of a class, where they are; those of torch's classes stay."""
    classes = [c for c in kind.__mro__ if not c.__module__.startswith("torch.")]
    own = [(c, name) for c in classes for name in vars(c) if name[:2] != "__"]
    return [(c, name) for c, name in own if _is_plain(vars(c)[name])]


def _is_plain(x: Any) -> bool:
    return type(x) in _PLAIN or isinstance(x, Tensor)


def variables(f: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function, or one that it defines, reads by name: cells, globals; and defaults.

    And, as ``settings.scale``, plain values and tensors of the modules and classes among these.
    """
    named = _named(f)
    yield from named
    yield from (("", value) for value in f.__defaults__ or ())
    yield from (f.__kwdefaults__ or {}).items()
    yield from ((f"{s.__name__}.{n}", vars(s)[n]) for s, n in _attributes(f, named))


def _named(f: types.FunctionType) -> list[tuple[str, Any]]:
    around, found = f.__globals__, []
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        with suppress(ValueError):  # not bound yet
            found.append((name, cell.cell_contents))
    return found + [(name, around[name]) for name in _names(f.__code__) if name in around]


def _attributes(f: types.FunctionType, named: list[tuple[str, Any]]) -> Iterator[tuple[Any, str]]:
    """The plain values and tensors in modules and classes that are named, as far as code says."""
    own = () if is_internal(f.__code__.co_filename) else named
    spaces = [value for _, value in own if isinstance(value, _SPACES)]
    for space in spaces:  # which grows
        names = () if space.__name__.startswith("torch") else _names(f.__code__)
        for name in [name for name in names if name in vars(space)]:
            value = vars(space)[name]
            if _is_plain(value):
                yield space, name
            elif isinstance(value, _SPACES) and value not in spaces:
                spaces.append(value)


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*code.co_names, *(name for c in inner for name in _names(c)))


@contextmanager
def restored(roots: Sequence[Any]) -> Iterator[None]:
    """Put back what a function does to what it reads, if its trace fails.

    Raises:
        TracingError: it has left a tensor of the trace there, or set ``.grad``.
    """
    if not _torch.tracing():  # in eager
        yield
        return
    before = State(roots)
    gradients = [(t, t.grad) for t in before.tensors if t.is_leaf]
    undo = [step for x in before.held for step in _undo(x)]
    try:
        yield
        if any(t.grad is not gradient for t, gradient in gradients):
            raise TracingError(
                "functx.jit: the function sets .grad of a tensor that it reads, by .backward() "
                "say, which a graph can't. Take gradients by functx.grad or torch.autograd.grad, "
                "or call .backward() outside."
            )
        after = State(roots)
        for t in filter(_is_fake, after.tensors):
            raise TracingError(
                f"functx.jit: the function leaves a tensor that it makes in {_holder(after, t)}, "
                "where it would be without values. If that is a cache, call the function once "
                "before, in eager, or fill it in __init__; else return the tensor."
            )
    except BaseException:
        for t, gradient in gradients:
            t.grad = gradient
        for step in undo:
            step()
        raise


def _undo(x: Any) -> Iterator[Callable[[], Any]]:
    """What puts back all that is in ``x`` now."""
    kind: Any = type(x)
    places: list[tuple[Any, str]] = []
    if kind is types.FunctionType:
        around = x.__globals__
        known = {name: around[name] for name in _names(x.__code__) if name in around}
        yield functools.partial(around.update, known)
        places = [(cell, "cell_contents") for cell in x.__closure__ or ()]
        places += _attributes(x, _named(x))
    elif isinstance(x, (list, set)):
        yield functools.partial(_fill, x, [*x])
    elif isinstance(x, dict) and not isinstance(x, Cache):
        yield functools.partial(_fill, x, dict(x))
    elif _inside(x) is not None and hasattr(x, "__dict__"):
        empty = [v for v in vars(x).values() if isinstance(v, dict) and not v]
        yield from (functools.partial(_fill, d, dict(d)) for d in (vars(x), *empty))
        places = _plain_of(kind)
    for place, name in places:
        with suppress(ValueError, AttributeError):  # a cell that is not bound yet
            yield functools.partial(_set, place, name, getattr(place, name))


def _set(x: Any, name: str, value: Any) -> None:
    if getattr(x, name, x) is not value:
        setattr(x, name, value)


def _fill(x: Any, before: Any) -> None:
    if isinstance(x, dict):
        for key in x.keys() - before.keys():
            del x[key]
        for key, value in before.items():
            if x.get(key, x) is not value:
                x[key] = value
    elif [*map(id, x)] != [*map(id, before)]:
        x.clear()
        (x.extend if isinstance(x, list) else x.update)(before)


def _is_fake(t: Tensor) -> bool:
    while _torch.is_wrapped(t):
        t = _torch.inner_of(t)
    return isinstance(t, _torch.FakeTensor)


def _holder(state: State, tensor: Tensor) -> str:
    """The name of the least that a tensor lies in."""
    found = []
    for x in state.held:
        is_function = isinstance(x, types.FunctionType)
        named = variables(x) if is_function else getattr(x, "__dict__", {}).items()
        for name, value in named if _inside(x) is not None else ():
            inside = State([value]).held
            if any(t is tensor for t in inside):
                owner = getattr(x, "__qualname__", type(x).__name__)
                found.append((len(inside), f"{name!r} of {owner}"))
    return min(found, default=(0, "an argument"))[1]
