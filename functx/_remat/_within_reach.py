"""What a function can reach, and may change: modules, objects, containers, globals."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from functx import _torch_modules
from functx._remat._code_names import OfGlobals, names_in
from functx._remat._containers import MUTABLE
from functx._remat._options import Options
from functx._remat._slots import slots_of

_LEAVES = frozenset({type(None), types.BuiltinFunctionType, bool, int, float, str, Options})
_DATA = _LEAVES | {Tensor, nn.Parameter, complex, bytes}
_LARGE = 1024  # data, then, rather than modules
_OBJECTS = 1024

_STATE = frozenset({type(None), bool, int, float, str, tuple, Tensor, nn.Parameter})
_NO_STATE = frozenset({type, types.ModuleType, torch.dtype, torch.device, Tensor})
_NO_OBJECTS = (type, types.ModuleType, Tensor)
_NOT_THE_USERS = frozenset(sys.stdlib_module_names) - {"types", "collections", "argparse"} | {
    *("torch", "numpy", "functx", "jax", "jaxlib")
}
_CONTAINERS = (list, dict, set, deque)
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class Reached:
    """What was found.

    Attributes:
        modules: of the user's and of torch.
        objects: others that have attributes.
        attributes: names of attributes that are in no dict: in slots of objects, and of classes.
        containers: lists, dicts and the like that are reached by these, or by a function.
        hooks: of modules: nothing else leads to what they close over.
        scopes: globals that functions rebind: the dict, and the names.
        named: globals that they name, likewise.
    """

    __slots__ = ("attributes", "containers", "hooks", "modules", "named", "objects", "scopes")

    def __init__(self) -> None:
        self.attributes: list[tuple[Any, tuple[str, ...]]] = []
        self.modules: list[nn.Module] = []
        self.objects: list[Any] = []
        self.containers: list[Any] = []
        self.hooks: list[Any] = []
        self.named: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.scopes: list[tuple[dict[str, Any], tuple[str, ...]]] = []


def reach(f: Any, arguments: Iterable[Any]) -> Reached:
    """What a function reaches: by cells, defaults and globals, as owner, as argument.

    And in containers and attributes of objects found there, if they are not large.
    """
    reached = Reached()
    modules: dict[int, nn.Module] = {}
    stack = [part for part in (f, *arguments) if type(part) not in _LEAVES]
    if any(_torch_modules.GLOBAL_HOOKS):
        stack += _hooks(_torch_modules.GLOBAL_HOOKS, reached)
    seen: set[int] = set()
    while stack:
        part = stack.pop()
        key, kind = id(part), type(part)
        if key in seen or kind in _LEAVES or kind is Tensor:
            continue
        seen.add(key)
        if kind is types.FunctionType:
            if part.__defaults__ is not None:
                stack += part.__defaults__
            if part.__kwdefaults__ is not None:
                stack += part.__kwdefaults__.values()
            for cell in part.__closure__ or ():
                try:
                    stack.append(cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
            _globals_of(part, stack, reached, seen)
        elif kind in MUTABLE or kind is tuple:
            if kind is not tuple:
                reached.containers.append(part)
            stack += _parts(part)
        elif isinstance(part, nn.Module):
            those = _torch_modules.modules_of(part)
            if hooks := _torch_modules.hooks_in(those):
                stack += _hooks(hooks, reached)
            for module in those:
                if id(module) not in modules and not _torch_modules.is_scripted(module):
                    modules[id(module)] = module
                    if type(module).__module__.partition(".")[0] not in _NOT_THE_USERS:
                        _class_of(type(module), stack, reached, seen)
                        own = module.__dict__
                        for name in own.keys() - _OF_EVERY_MODULE:
                            if type(own[name]) not in _LEAVES:
                                stack.append(own[name])
                        stack.append(type(module).forward)
        elif kind is types.MethodType:
            stack += (part.__func__, part.__self__)
        elif isinstance(part, functools.partial):
            stack += (part.func, *part.args, *part.keywords.values())
        elif len(reached.objects) <= _OBJECTS:
            _attributes_of(part, stack, reached, seen)
    reached.modules += modules.values()
    return reached


def _hooks(found: Iterable[dict[int, Any]], reached: Reached) -> list[Any]:
    hooks = [hook for those in found for hook in those.values()]
    reached.hooks += hooks
    return hooks


def reachable(f: Any, arguments: Iterable[Any]) -> list[nn.Module]:
    """Modules that a function reaches."""
    return reach(f, arguments).modules


def _parts(c: Any) -> Iterable[Any]:
    """What a container holds; nothing if that is data."""
    if len(c) > _LARGE:
        return ()
    parts = c.values() if isinstance(c, dict) else c
    return () if _DATA.issuperset(map(type, parts)) else parts


def _globals_of(f: types.FunctionType, stack: list[Any], reached: Reached, seen: set[int]) -> None:
    scope = f.__globals__
    names, rebound = names_in(f.__code__)
    reached.named.append((scope, names))
    if rebound:
        reached.scopes.append((scope, rebound))
    values, which = _leading_on(f)
    for i in which:
        value = values[i]
        kind = type(value)
        if kind is types.FunctionType or kind in MUTABLE or isinstance(value, (nn.Module, tuple)):
            stack.append(value)
        elif isinstance(value, type):
            _class_of(value, stack, reached, seen)
        else:
            _attributes_of(value, stack, reached, seen)


def _lead_on(names: Sequence[str], values: Sequence[Any]) -> list[int]:
    """Which of some globals lead to what may be changed."""
    found = []
    for i, value in enumerate(values):
        kind = type(value)
        if kind is types.FunctionType or isinstance(value, type):
            leads = (value.__module__ or "").partition(".")[0] not in _NOT_THE_USERS
        else:
            leads = kind not in _LEAVES and kind not in _NO_STATE
        if leads:
            found.append(i)
    return found


_leading_on = OfGlobals(_lead_on)


def _class_of(cls: type, stack: list[Any], reached: Reached, seen: set[int]) -> None:
    """What a class of the user's holds: a counter, a list of losses."""
    for base in cls.__mro__:
        if id(base) in seen or base.__module__.partition(".")[0] in _NOT_THE_USERS:
            continue
        seen.add(id(base))
        names = []
        for name, x in base.__dict__.items():
            kind = type(x)
            if name[:2] != "__" and (kind in _STATE or kind in MUTABLE):
                names.append(name)
                if kind in MUTABLE:
                    stack.append(x)
        if names:
            reached.attributes.append((base, (*names,)))


def _attributes_of(part: Any, stack: list[Any], reached: Reached, seen: set[int]) -> None:
    """What an object of the user's holds."""
    kind = type(part)
    if kind.__module__.partition(".")[0] in _NOT_THE_USERS or isinstance(part, _NO_OBJECTS):
        return
    own = getattr(part, "__dict__", None)
    if isinstance(part, _CONTAINERS):
        reached.containers.append(part)
        stack += _parts(part)
    if own is not None:
        reached.objects.append(part)
        stack += [x for x in own.values() if type(x) not in _LEAVES]
        if callable(part):
            stack.append(kind.__call__)
    _class_of(kind, stack, reached, seen)
    if names := slots_of(kind):
        reached.attributes.append((part, names))
        stack += [getattr(part, name, None) for name in names]
