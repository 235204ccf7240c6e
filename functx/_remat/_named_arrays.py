"""Which of the large NumPy arrays within reach a region may be told to write to.

Those which it holds, is given, or has as a global, and attributes that its code names: what lies in
an object beside these is somebody else's. In a container, or an object of an installed package,
whose code is not read, a region may touch some arrays, and another thread others. Where there is
one, nothing tells which of them has written, and those do not count.
"""

from __future__ import annotations

import functools
import gc
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from functx._remat._code_names import BY_ANY_NAME, names_in
from functx._remat._reached import Reached
from functx._remat._really_held import OF_OWNERS, RARE, WEAK, entries, own_dict
from functx._remat._slots import in_slots, slot_of, slots_of
from functx._remat._whose import held_by, mro

_CONTAINERS = (list, dict, set, deque, tuple, frozenset)
_ENTRIES = 8192


def named_arrays(reached: Reached, seen: Iterable[Any], given: Iterable[Any]) -> list[Any]:
    """Those of `reached.large`, in their order.

    Args:
        reached: by a region.
        seen: all that was looked at.
        given: its arguments.
    """
    names = reached.names()
    direct = [*given]
    others: list[Any] = []
    for held in _attributes(reached):
        direct += [held[name] for name in held.keys() & names]
        if not BY_ANY_NAME.isdisjoint(names):
            others += held.values()
    large = {*map(id, reached.large)}
    for part in seen:
        if id(part) not in large:
            direct += _held_by(part, names)
    counted = {*map(id, direct)}
    if threading.active_count() == 1:
        counted = _within([*direct, *others], reached)
    return [array for array in reached.large if id(array) in counted]


def _attributes(reached: Reached) -> Iterator[Mapping[str, Any]]:
    for one in (*reached.objects, *reached.modules):
        yield dict(one.__dict__)
    for one, names in reached.attributes:
        if isinstance(one, type):
            yield {name: x for name, x in [*held_by(one).items()] if name in names}
        else:
            yield _in_slots(one, names)
    yield from map(dict, reached.namespaces.values())


def _in_slots(one: Any, names: Iterable[str]) -> dict[str, Any]:
    slots = {name: slot for name in names if (slot := slot_of(type(one), name)) is not None}
    return {name: x for name, slot in slots.items() for x in in_slots(one, [slot])}


def _held_by(part: Any, names: set[str]) -> Iterable[Any]:
    """What something holds that is no attribute."""
    kind = type(part)
    if kind is types.FunctionType:
        cells = gc.get_referents(*(part.__closure__ or ()))
        scope = part.__globals__
        globals_of_it = [scope.get(name) for name in names_in(part.__code__)[0]]
        defaults = (*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values())
        return (*cells, *defaults, *globals_of_it)
    if kind is types.MethodType or kind in OF_OWNERS:
        return (part.__self__,)
    if issubclass(kind, functools.partial):
        return (*part.args, *part.keywords.values())
    if issubclass(kind, weakref.ref):
        return (weakref.ref.__call__(part),)
    if kind is ContextVar:
        return (part.get(None),)
    if kind is types.MappingProxyType:
        return (*part.values(),)
    if issubclass(kind, threading.local) or issubclass(kind, _CONTAINERS):
        return ()
    if RARE[kind]:
        return gc.get_referents(part)
    own = own_dict(part)
    return [own[name] for name in own.keys() & names]


def _within(those: Iterable[Any], reached: Reached) -> set[int]:
    """The ids of these, and of what is in them, as far as there are no objects of the user's."""
    ahead, found = deque(those), set[int]()
    while ahead:
        x = ahead.popleft()
        if id(x) in found:
            continue
        found.add(id(x))
        kind = type(x)
        for base in _CONTAINERS:
            if issubclass(kind, base):
                entries(x, base, ahead, _ENTRIES)
        if kind in WEAK or any(not reached.spaces.get(id(base), True) for base in mro(kind)):
            ahead += own_dict(x).values()
            ahead += _in_slots(x, slots_of(kind)).values()
        elif issubclass(kind, weakref.ref):
            ahead.append(weakref.ref.__call__(x))
    return found
