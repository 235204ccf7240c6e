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
import gc
import io
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from functx import _torch_modules, _torch_operators
from functx._remat._code_names import NOT_NAMED, SETTERS, OfGlobals, imported, names_in
from functx._remat._containers import MUTABLE
from functx._remat._named_arrays import named_arrays
from functx._remat._python_random import PACKAGES, behind, is_array, is_generator, named_by
from functx._remat._reached import Reached
from functx._remat._really_held import (
    CACHED,
    CODE,
    DATA,
    INSIDE,
    LEAVES,
    OF_OWNERS,
    RARE,
    WEAK,
    entries,
    looks_alike,
    own_dict,
    parts_of,
    shows,
)
from functx._remat._slots import in_slots, slot_of, slots_of
from functx._remat._whose import (
    NOT_THE_USERS,
    held_by,
    is_installed,
    is_there,
    is_users,
    module_of,
    module_of_class,
    mro,
    namespace,
    package_of,
)

_OBJECTS = 1024
_ENTRIES = 8192

_NO_STATE = frozenset({type, types.ModuleType, torch.dtype, torch.device, Tensor})
_NO_OBJECTS = (type, types.ModuleType, Tensor)
_CONTAINERS = (list, dict, set, deque)
# What `nn.Module` and the recurrent modules keep their own books in.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {
    f"_{name}" for name in ("all_weights", "flat_weights", "flat_weights_names", "flat_weight_refs")
}
# By a class of torch's, how many attributes its modules have where these lead nowhere.
_plain: dict[type, int] = {}

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})
_MAKING = ("__init__", "__new__", "__post_init__")


def reach(f: Any, arguments: Iterable[Any]) -> Reached:
    """What a function reaches: by cells, defaults and globals, as owner, as argument.

    And in containers and attributes of objects found there, the nearest first, if they are not too
    many. What raises when it is looked at leads nowhere. NOTE [methods].
    """
    reached = Reached()
    modules: dict[int, nn.Module] = {}
    ahead = deque(part for part in arguments if type(part) not in DATA)
    if type(f) is not types.BuiltinFunctionType:
        ahead.appendleft(f)
    if any(_torch_modules.GLOBAL_HOOKS):
        ahead += _hooks(_torch_modules.GLOBAL_HOOKS, reached)
    seen: dict[int, Any] = {}  # with what was seen: another could have the id of what has gone
    left = _ENTRIES
    calls: _Calls | None = None
    while ahead or (reached.spaces and (calls := calls or _Calls(reached)).go_on(ahead)):
        part = ahead.popleft()
        key, kind = id(part), type(part)
        if key in seen or kind in LEAVES or kind is Tensor:
            continue
        seen[key] = part
        if kind is types.FunctionType:
            if part.__defaults__ is not None:
                ahead += part.__defaults__
            if part.__kwdefaults__ is not None:
                ahead += part.__kwdefaults__.values()
            for cell in part.__closure__ or ():
                try:
                    ahead.append(cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
            _globals_of(part, ahead, reached)
        elif kind in MUTABLE or kind is tuple:
            if kind is not tuple:
                reached.containers.append(part)
            parts = parts_of(part)
            if len(parts) <= left:
                left -= len(parts)
                ahead += parts
        elif issubclass(kind, nn.Module):
            those = _torch_modules.modules_of(part, ahead)
            if hooks := _torch_modules.hooks_in(those.values()):
                ahead += _hooks(hooks, reached)
            if modules:
                those = {key: those[key] for key in those if key not in modules}
            modules |= those
            for module in those.values():
                if _plain.get(type(module)) != len(module.__dict__):
                    _module(module, ahead, reached)
            if key not in modules and not _torch_modules.is_scripted(part):
                left -= _attributes_of(part, ahead, reached, left)
        elif kind is types.MethodType:
            ahead += (part.__func__, part.__self__)
        elif kind in OF_OWNERS:
            if (generator := behind(part)) is not None:
                reached.generators[id(generator)] = generator
            else:
                ahead.append(part.__self__)
        elif issubclass(kind, functools.partial):
            ahead += (part.func, *part.args, *part.keywords.values())
        else:
            left -= _attributes_of(part, ahead, reached, left)
    reached.modules += modules.values()
    if calls is not None and reached.namespaces:
        calls.note_state()
    if reached.large:
        reached.rare += named_arrays(reached, seen.values(), arguments)
    return reached


def _module(module: nn.Module, ahead: deque[Any], reached: Reached) -> None:
    """What a module holds beside those below it; of a layer of torch's, what the user has added."""
    kind, own = type(module), module.__dict__
    names = own.keys() - _OF_EVERY_MODULE
    found = [
        x
        for x in map(own.get, names)
        if type(x) not in LEAVES and (type(x) is not tuple or parts_of(x))
    ]
    ahead += found
    if not NOT_THE_USERS[module_of_class(kind)]:
        _class_of(kind, ahead, reached, whole=True)
    elif not found and names <= _set_by(kind) and is_there(kind):
        _plain[kind] = len(own)


def _set_by(cls: type) -> set[str]:
    """The attributes that a class sets when it makes an object."""
    made = [held_by(base).get("__init__") for base in mro(cls)]
    codes = [f.__code__ for f in made if type(f) is types.FunctionType]
    return set().union(*[names_in(code)[3] for code in codes])


def _hooks(found: Iterable[dict[int, Any]], reached: Reached) -> list[Any]:
    hooks = [hook for those in found for hook in those.values()]
    reached.hooks += hooks
    return hooks


def reachable(f: Any, arguments: Iterable[Any]) -> list[nn.Module]:
    """Modules that a function reaches."""
    return reach(f, arguments).modules


def _globals_of(f: types.FunctionType, ahead: deque[Any], reached: Reached) -> None:
    scope = f.__globals__
    names, rebound, imports, stored = names_in(f.__code__)
    reached.named.append((scope, names))
    if rebound:
        reached.scopes.append((scope, rebound))
    values, (which, packages, spaces) = _leading_on(f)
    if packages:
        reached.packages |= packages
    if which:
        ahead += [values[i] for i in which]
    if spaces and stored:
        reached.scopes += [(namespace(values[i]), stored) for i in spaces]
    if imports:
        ahead += imported(imports, scope)
    if "ops" in names:
        ahead += _torch_operators.kernels_named(names)


def _lead_on(
    names: Sequence[str], values: Sequence[Any]
) -> tuple[list[int], frozenset[str], list[int]]:
    """Which of some globals lead to what may be changed, and the packages of generators named.

    And which are modules of the user's.
    """
    found, spaces = [], []
    for i, value in enumerate(values):
        kind = type(value)
        if kind is types.FunctionType:
            leads = is_users(value)
        elif issubclass(kind, (type, types.ModuleType)):
            leads = not NOT_THE_USERS[module_of(value)]
            if leads and not issubclass(kind, type) and not is_installed(package_of(value)):
                spaces.append(i)
        elif kind in OF_OWNERS:
            leads = type(value.__self__) not in _NO_STATE and value.__self__ is not None
        else:
            leads = kind not in LEAVES and kind not in _NO_STATE
        if leads:
            found.append(i)
    return found, named_by(names, values), spaces


_leading_on = OfGlobals(_lead_on)


def _class_of(cls: type, ahead: deque[Any], reached: Reached, *, whole: bool = False) -> None:
    """What a class of the user's holds: a counter, a list of losses."""
    for base in mro(cls):
        known = reached.spaces.get(id(base))
        if not (known is None or (whole and known is _NOTHING)):
            continue
        if NOT_THE_USERS[module_of_class(base)]:
            continue
        held = held_by(base)
        installed = not whole and is_installed(package_of(base))
        reached.spaces[id(base)] = _NOTHING if installed else held
        names = []
        for name, x in [*held.items()]:
            kind = type(x)
            if kind not in CODE and type(name) is str and name[:2] != "__":
                names.append(name)
                if kind not in LEAVES:
                    ahead.append(x)
        if names and shows(base, held):
            reached.attributes.append((base, (*names,)))


class _Calls:
    """The methods of classes, and what modules hold, that are named. NOTE [methods].

    Each is looked up once: where its name is new, or what holds it.
    """

    __slots__ = ("_looked", "_names", "_reached", "_read")

    def __init__(self, reached: Reached) -> None:
        self._reached = reached
        self._names: frozenset[str] | set[str] = NOT_NAMED
        self._read = 0
        self._looked: dict[int, Mapping[str, Any]] = {}

    def go_on(self, ahead: deque[Any]) -> bool:
        """Go on with those named since the last call; whether there are any."""
        named, looked = self._reached.named, self._looked
        new = set[str]().union(*[names for _, names in named[self._read :]]) - self._names
        self._read = len(named)
        self._names = names = self._names | new
        for key, held in self._reached.spaces.items():
            wanted = new if looked.get(key) is held else names
            looked[key] = held
            for name in held.keys() & wanted:
                try:
                    _inside(held[name], ahead)
                except KeyError:  # another thread has taken it away
                    continue
        return bool(ahead)

    def note_state(self) -> None:
        """Note what is named of modules of the user's, and may be bound to something else."""
        every = not SETTERS.isdisjoint(self._names)
        for held in self._reached.namespaces.values():
            names = [*held] if every else held.keys() & self._names
            if state := [name for name in names if type(held.get(name)) not in CODE]:
                self._reached.scopes.append((held, (*state,)))


def _inside(x: Any, ahead: deque[Any]) -> None:
    """Go on with an attribute of a class, or with the functions in it."""
    parts = INSIDE.get(type(x))
    if parts is not None:
        ahead += [getattr(x, part) for part in parts]
    elif type(x) not in LEAVES:
        ahead.append(x)


def _attributes_of(part: Any, ahead: deque[Any], reached: Reached, left: int) -> int:
    """What an object of the user's holds, or another leads to; how many entries were looked at.

    Args:
        part: the object.
        ahead: what it holds is added there.
        reached: likewise.
        left: so many entries of containers may be looked at.
    """
    try:
        kind = type(part)
        if issubclass(kind, (tuple, frozenset)):
            return entries(part, tuple if issubclass(kind, tuple) else frozenset, ahead, left)
        pythons = NOT_THE_USERS[module_of_class(kind)] and kind not in WEAK
        if pythons or issubclass(kind, _NO_OBJECTS):
            _other(part, ahead, reached)
            return 0
        looked = 0
        if len(reached.objects) + len(reached.attributes) <= _OBJECTS:
            looked = _object(part, ahead, reached, left)
        if is_generator(part):  # of a class derived from one
            reached.generators[id(part)] = part
    except Exception:  # an object may do anything when it is looked at
        return 0
    return looked


def _object(part: Any, ahead: deque[Any], reached: Reached, left: int) -> int:
    """What an object of the user's holds; how many entries were looked at."""
    kind, looked = type(part), 0
    for base in _CONTAINERS:
        if issubclass(kind, base):
            looked = entries(part, base, ahead, left)
            if looks_alike(part, base):
                reached.containers.append(part)
    own = getattr(part, "__dict__", None)
    if issubclass(type(own), dict) and part.__dict__ is own:
        reached.objects.append(part)
    else:  # none, or what it says is one; that of a property is another at each look
        own = own_dict(part)
    if issubclass(kind, threading.local):
        reached.rare.append(part)
    ahead += [x for x in [*dict.values(own)] if type(x) not in LEAVES]
    _class_of(kind, ahead, reached)
    if names := slots_of(kind):
        slots = {name: slot for name in names if (slot := slot_of(kind, name)) is not None}
        ahead += in_slots(part, slots.values())
        reached.attributes.append((part, (*slots,)))
    return looked


def _other(part: Any, ahead: deque[Any], reached: Reached) -> None:
    """What is no object of the user's, and may lead to one, or draw."""
    kind = type(part)
    if issubclass(kind, Tensor):
        return
    if RARE[kind]:
        reached.rare.append(part)
        if kind is ContextVar:
            ahead.append(part.get(None))
        elif issubclass(kind, threading.local):
            reached.objects.append(part)
            ahead += part.__dict__.values()
        elif issubclass(kind, Iterator) and not issubclass(kind, io.IOBase):
            ahead += gc.get_referents(part)
        return
    package = package_of(part)
    users = not NOT_THE_USERS[module_of(part)]
    if package in PACKAGES and not users:
        if is_array(part):
            reached.note_array(part)
        elif is_generator(part):
            reached.generators[id(part)] = part
        else:
            reached.packages |= {package}
    elif issubclass(kind, type):
        if users:
            _class_of(part, ahead, reached)
            for base in mro(part):
                if not NOT_THE_USERS[module_of(base)] and not is_installed(package_of(base)):
                    held = held_by(base)
                    for name in _MAKING:
                        if name in held:
                            _inside(held[name], ahead)
    elif issubclass(kind, types.ModuleType):
        if users and not is_installed(package):
            held = namespace(part)
            reached.spaces[id(part)] = reached.namespaces[id(part)] = held
    elif kind is CACHED:
        ahead.append(part.__wrapped__)
    elif issubclass(kind, weakref.ref):
        ahead.append(weakref.ref.__call__(part))
    elif kind is types.MappingProxyType:
        ahead += [*part.values()]
    elif kind in weakref.ProxyTypes:
        ahead.append(part.__repr__.__self__)  # that of what it stands for
    elif package == "torch":
        ahead += _torch_operators.kernels_of(part)
