"""What a function can reach, and may change: modules, objects, containers, globals, generators.

NOTE [methods]
Which methods of a class are called, and which functions of a module of the user's, is told by their
names: all that code within reach names, on whatever it calls it. What Python calls by itself
(``__call__``, ``__getitem__``) counts as named. No attribute is asked for: a property would run. Of
packages that are installed, only classes of ``nn.Module`` are looked into like that: some have
thousands of functions.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from functx import _torch_modules, _torch_operators
from functx._remat._code_names import OfGlobals, names_in
from functx._remat._containers import MUTABLE
from functx._remat._options import Options
from functx._remat._past_torch import LITTLE
from functx._remat._python_random import (
    PACKAGES,
    behind,
    is_array,
    is_generator,
    named_by,
    package_of,
)
from functx._remat._slots import slots_of

_LEAVES = frozenset({type(None), bool, int, float, str, Options})
_DATA = _LEAVES | {types.BuiltinFunctionType, Tensor, nn.Parameter, complex, bytes}
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

# NOTE [methods]: what is called that no code names; and of a class that code may call.
_NOT_NAMED = frozenset(
    f"__{name}__"
    for name in (
        *("call", "getattr", "getattribute", "setattr", "get", "set", "len", "iter", "next"),
        *("getitem", "setitem", "delitem", "contains", "enter", "exit", "bool", "float", "int"),
        *("index", "array", "torch_function", "eq", "ne", "lt", "le", "gt", "ge", "hash", "neg"),
        *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "matmul", "rmatmul"),
        *("truediv", "rtruediv", "itruediv", "floordiv", "mod", "pow", "rpow", "abs", "invert"),
        *("and", "rand", "or", "ror", "xor", "lshift", "rlshift", "rshift", "rrshift", "str"),
    )
) | {"forward", "setup_context"}
_CACHED = type(functools.lru_cache(resolve_name))
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})
_MAKING = ("__init__", "__new__", "__post_init__")
_INSIDE = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    functools.cached_property: ("func",),
    functools.partialmethod: ("func",),
}


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
        packages: of generators (``random``, ``numpy``) that code is of or names.
        arrays: of NumPy's, that may be written to, while they are within `memory` bytes.
        generators: such of the user's, by id.
        spaces: what classes and modules of the user's hold, by the id of each. NOTE [methods].
    """

    __slots__ = (
        *("attributes", "containers", "hooks", "modules", "named", "objects", "scopes"),
        *("arrays", "generators", "memory", "packages", "spaces"),
    )

    def __init__(self) -> None:
        self.attributes: list[tuple[Any, tuple[str, ...]]] = []
        self.modules: list[nn.Module] = []
        self.objects: list[Any] = []
        self.containers: list[Any] = []
        self.hooks: list[Any] = []
        self.named: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.scopes: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.packages: frozenset[str] = frozenset()
        self.arrays: list[Any] = []
        self.memory = LITTLE
        self.generators: dict[int, Any] = {}
        self.spaces: dict[int, Mapping[str, Any]] = {}


def reach(f: Any, arguments: Iterable[Any]) -> Reached:
    """What a function reaches: by cells, defaults and globals, as owner, as argument.

    And in containers and attributes of objects found there, if they are not large.
    NOTE [methods].
    """
    reached = Reached()
    modules: dict[int, nn.Module] = {}
    stack = [part for part in (f, *arguments) if type(part) not in _DATA]
    if any(_torch_modules.GLOBAL_HOOKS):
        stack += _hooks(_torch_modules.GLOBAL_HOOKS, reached)
    seen: set[int] = set()
    calls: _Calls | None = None
    while stack or (reached.spaces and (calls := calls or _Calls(reached)).go_on(stack)):
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
            _globals_of(part, stack, reached)
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
                        _class_of(type(module), stack, reached, whole=True)
                        own = module.__dict__
                        for name in own.keys() - _OF_EVERY_MODULE:
                            if type(own[name]) not in _LEAVES:
                                stack.append(own[name])
                    elif "forward" in module.__dict__:  # of a layer of torch's, in place of its own
                        stack.append(module.__dict__["forward"])
        elif kind is types.MethodType:
            stack += (part.__func__, part.__self__)
        elif kind is types.BuiltinFunctionType:
            if (generator := behind(part)) is not None:
                reached.generators[id(generator)] = generator
        elif isinstance(part, functools.partial):
            stack += (part.func, *part.args, *part.keywords.values())
        elif len(reached.objects) <= _OBJECTS:
            _attributes_of(part, stack, reached)
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


def _globals_of(f: types.FunctionType, stack: list[Any], reached: Reached) -> None:
    scope = f.__globals__
    names, rebound, imports = names_in(f.__code__)
    reached.named.append((scope, names))
    if rebound:
        reached.scopes.append((scope, rebound))
    values, (which, packages) = _leading_on(f)
    if packages:
        reached.packages |= packages
    if which:
        stack += [values[i] for i in which]
    if imports:
        stack += _imported(imports, scope)
    if "ops" in names:
        stack += _torch_operators.kernels_named(names)


def _imported(names: Iterable[str], scope: dict[str, Any]) -> list[Any]:
    """The modules that code imports when it runs, as far as they are there."""
    package = scope.get("__package__") or ""
    if not package:
        names = [name for name in names if name[:1] != "."]
    found = [sys.modules.get(resolve_name(name, package)) for name in names]
    return [module for module in found if module is not None]


def _lead_on(names: Sequence[str], values: Sequence[Any]) -> tuple[list[int], frozenset[str]]:
    """Which of some globals lead to what may be changed, and the packages of generators named."""
    found = []
    for i, value in enumerate(values):
        kind = type(value)
        if kind is types.FunctionType or isinstance(value, (type, types.ModuleType)):
            leads = package_of(value) not in _NOT_THE_USERS
        elif kind is types.BuiltinFunctionType:
            leads = behind(value) is not None
        else:
            leads = kind not in _LEAVES and kind not in _NO_STATE
        if leads:
            found.append(i)
    return found, named_by(names, values)


_leading_on = OfGlobals(_lead_on)


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether a package is a library, in one of the places for these."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return not _LIBRARIES.isdisjoint(Path(file).parts)


_LIBRARIES = frozenset({"site-packages", "dist-packages"})


def _class_of(cls: type, stack: list[Any], reached: Reached, *, whole: bool = False) -> None:
    """What a class of the user's holds: a counter, a list of losses."""
    for base in cls.__mro__:
        package = base.__module__.partition(".")[0]
        known = reached.spaces.get(id(base))
        if package in _NOT_THE_USERS or not (known is None or (whole and known is _NOTHING)):
            continue
        held = base.__dict__
        reached.spaces[id(base)] = held if whole or not _is_installed(package) else _NOTHING
        names = []
        for name, x in held.items():
            kind = type(x)
            if name[:2] != "__" and (kind in _STATE or kind in MUTABLE):
                names.append(name)
                if kind in MUTABLE:
                    stack.append(x)
        if names:
            reached.attributes.append((base, (*names,)))


class _Calls:
    """The methods of classes, and what modules hold, that are named. NOTE [methods].

    Each is looked up once: where its name is new, or what holds it.
    """

    __slots__ = ("_looked", "_names", "_reached", "_read")

    def __init__(self, reached: Reached) -> None:
        self._reached = reached
        self._names: frozenset[str] | set[str] = _NOT_NAMED
        self._read = 0
        self._looked: dict[int, Mapping[str, Any]] = {}

    def go_on(self, stack: list[Any]) -> bool:
        """Go on with those named since the last call; whether there are any."""
        named, looked = self._reached.named, self._looked
        new = set[str]().union(*[names for _, names in named[self._read :]]) - self._names
        self._read = len(named)
        self._names = names = self._names | new
        for key, held in self._reached.spaces.items():
            wanted = new if looked.get(key) is held else names
            looked[key] = held
            for name in held.keys() & wanted:
                _inside(held[name], stack)
        return bool(stack)


def _inside(x: Any, stack: list[Any]) -> None:
    """Go on with an attribute of a class, or with the functions in it."""
    parts = _INSIDE.get(type(x))
    if parts is not None:
        stack += [getattr(x, part) for part in parts]
    elif type(x) not in _LEAVES:
        stack.append(x)


def _attributes_of(part: Any, stack: list[Any], reached: Reached) -> None:
    """What an object of the user's holds."""
    kind = type(part)
    if isinstance(part, _NO_OBJECTS) or kind.__module__.partition(".")[0] in _NOT_THE_USERS:
        _other(part, stack, reached)
        return
    own = getattr(part, "__dict__", None)
    if isinstance(part, _CONTAINERS):
        reached.containers.append(part)
        stack += _parts(part)
    if own is not None:
        reached.objects.append(part)
        stack += [x for x in own.values() if type(x) not in _LEAVES]
    _class_of(kind, stack, reached)
    if names := slots_of(kind):
        reached.attributes.append((part, names))
        stack += [getattr(part, name, None) for name in names]
    if is_generator(part):  # of a class derived from one
        reached.generators[id(part)] = part


def _other(part: Any, stack: list[Any], reached: Reached) -> None:
    """What is no object of the user's, and may lead to one, or draw."""
    if isinstance(part, Tensor):
        return
    package = package_of(part)
    if package in PACKAGES:
        if is_array(part):
            if part.flags.writeable and (left := reached.memory - part.nbytes) >= 0:
                reached.memory = left
                reached.arrays.append(part)
        elif is_generator(part):
            reached.generators[id(part)] = part
        else:
            reached.packages |= {package}
    elif isinstance(part, type):
        if package not in _NOT_THE_USERS:
            _class_of(part, stack, reached)
            for base in part.__mro__:
                if (of := package_of(base)) not in _NOT_THE_USERS and not _is_installed(of):
                    for name in _MAKING:
                        if name in base.__dict__:
                            _inside(base.__dict__[name], stack)
    elif isinstance(part, types.ModuleType):
        if package not in _NOT_THE_USERS and not _is_installed(package):
            reached.spaces[id(part)] = part.__dict__
    elif type(part) is _CACHED:
        stack.append(part.__wrapped__)
    elif package == "torch":
        stack += _torch_operators.kernels_of(part)
