"""What objects and containers hold, whatever their classes make of being looked at.

A class derived from a list or a dict may give other things, made anew at each look; so may a
property that stands for ``__dict__``. Followed is what an object really holds. What is remembered
and put back is that of objects which show what they hold.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import queue
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from functx._remat._options import Options
from functx._remat._whose import held_by, is_there, mro

LEAVES = frozenset({type(None), bool, int, float, str, Options})
DATA = LEAVES | {Tensor, nn.Parameter, complex, bytes}
_LARGE = 1024  # data, then, rather than modules

CACHED = type(functools.lru_cache(copy.copy))
OF_OWNERS = (types.BuiltinFunctionType, types.MethodWrapperType)
INSIDE = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    functools.cached_property: ("func",),
    functools.partialmethod: ("func",),
}
# What a class or a module holds that is code, and no state.
CODE = frozenset({*INSIDE, *OF_OWNERS, types.FunctionType, type, types.ModuleType, CACHED}) | {
    *(types.MemberDescriptorType, types.GetSetDescriptorType, functools.singledispatchmethod),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
}

# Of Python's, with attributes that hold what a user puts there.
WEAK = frozenset({weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet})
QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue, asyncio.Queue, queue.SimpleQueue)
_ITERATES = (Iterator, io.IOBase)


class _Rare(dict[type, bool]):
    """Whether objects of some class are put back in a way of their own. `_rare`."""

    def __missing__(self, kind: type) -> bool:
        found = kind in QUEUES or issubclass(kind, (threading.local, ContextVar, *_ITERATES))
        found = found and kind not in weakref.ProxyTypes
        if is_there(kind):
            self[kind] = found
        return found


RARE = _Rare()


def parts_of(c: Any) -> Any:
    """What a container holds; nothing if that is data."""
    if len(c) > _LARGE:
        return ()
    parts = c.values() if isinstance(c, dict) else c
    return () if DATA.issuperset(map(type, parts)) else parts


def _as_base_has_them(c: Any, base: Any) -> list[Any]:
    return [*(dict.values(c) if base is dict else base.__iter__(c))]


def entries(c: Any, base: Any, ahead: deque[Any], left: int) -> int:
    """Go on with what a container of a class derived from one of Python's holds, as that has it."""
    if base.__len__(c) > min(left, _LARGE):
        return 0
    parts = _as_base_has_them(c, base)
    if DATA.issuperset(map(type, parts)):
        return 0
    ahead += parts
    return len(parts)


def looks_alike(c: Any, base: Any) -> bool:
    """Whether a container that may have methods of its own shows what it holds."""
    kind = type(c)
    if kind.__len__ is base.__len__ and kind.__iter__ is base.__iter__ and base is not dict:
        return True
    try:
        parts = _as_base_has_them(c, base)
        shown = [*(c.values() if base is dict else c)]
        return len(c) == len(parts) and [*map(id, shown)] == [*map(id, parts)]
    except Exception:  # as above
        return False


def own_dict(part: Any) -> dict[str, Any]:
    """The attributes of an object that shows others, or none, as its ``__dict__``."""
    for base in mro(type(part)):
        found = held_by(base).get("__dict__")
        if type(found) is types.GetSetDescriptorType:
            return found.__get__(part)
    return {}


def shows(cls: type, held: Mapping[str, Any]) -> bool:
    """Whether a class gives what it holds when it is asked for that."""
    try:
        return cls.__dict__ == held
    except Exception:  # a metaclass may do anything
        return False
