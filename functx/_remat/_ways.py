"""The ways to containers and attributes: how a node knows them and holds nothing of a tape.

NOTE [containers that a node knows] of `_module_state`. All ways are found in one pass, from what
leads to containers to what these hold, and followed in one: linked dicts may be thousands deep.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from functx._remat._containers import MUTABLE, elements, reached
from functx._remat._reached import Reached
from functx._remat._slots import slot_of, slots_of

_MANY = 8192  # entries; what holds more is data


class Attributes:
    """Those of an object, by name: in its dict, in slots, or of a class."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        try:
            self._of: Any = weakref.ref(of)
        except TypeError:
            self._of = of

    def __call__(self) -> Any:
        """The object, if it is still there."""
        return self._of() if isinstance(self._of, weakref.ref) else self._of

    def may_be_known(self) -> bool:
        """Whether a node may know the object: it is not held, or holds nothing of a tape."""
        one = self._of
        if isinstance(one, weakref.ref):
            return True
        held = [self.get(name, None) for name in slots_of(type(one))]
        held += getattr(one, "__dict__", {}).values()
        return not leads_to_a_tape([held])

    def get(self, name: str, default: Any) -> Any:
        """The value of an attribute; of a class, its own."""
        one = self()
        if not isinstance(one, type) and (slot := slot_of(type(one), name)) is not None:
            try:
                return slot.__get__(one, type(one))
            except AttributeError:
                return default
        return getattr(one, "__dict__", {}).get(name, default)

    def pop(self, name: str, default: Any) -> None:
        """Take an attribute away."""
        one = self()
        if one is None or self.get(name, default) is default:
            return
        if isinstance(one, type):
            type.__delattr__(one, name)  # a metaclass may refuse it
        elif (slot := slot_of(type(one), name)) is not None:
            slot.__delete__(one)
        else:
            del one.__dict__[name]

    def __setitem__(self, name: str, value: Any) -> None:
        one = self()
        if isinstance(one, type):
            type.__setattr__(one, name, value)
        elif one is not None and (slot := slot_of(type(one), name)) is not None:
            slot.__set__(one, value)
        elif one is not None:
            one.__dict__[name] = value


class Held:
    """A container in no object and no global."""

    __slots__ = ("container",)

    def __init__(self, container: Any) -> None:
        self.container = container

    def __call__(self) -> Any:
        return self.container


# Where a way begins, or the way to what leads on; how it does; and a name, a key or a place.
Step = tuple[Any, Callable[[Any, Any], Any], Any]


def _attribute(attributes: Attributes, name: str) -> Any:
    return attributes.get(name, None)


def _of_context(variable: ContextVar[Any], _: Any) -> Any:
    return variable.get(None)


def _cell(f: types.FunctionType, i: int) -> Any:
    return content((f.__closure__ or ())[i])


def _item(c: Any, key: Any) -> Any:
    return c[key]


def content(cell: Any) -> Any:
    """What is in a cell."""
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


class Ways:
    """The ways to containers, as they are now."""

    def __init__(self, found: Reached) -> None:
        self._known: dict[int, Any] = {}
        self._owned: set[int] = set()
        self._containers = {id(c): c for c in found.containers}
        self._to_a_tape: set[int] | None = None
        level = []
        for step, x in _first(found, self._containers):
            if id(x) not in self._known:
                self._known[id(x)] = step
                level.append(x)
                if step[1] is _attribute or step[1] is _of_context:
                    self._owned.add(id(x))
        for c in found.containers:
            if id(c) not in self._known and type(c) not in MUTABLE and type(c).__weakrefoffset__:
                self._known[id(c)] = weakref.ref(c)  # of a class of the user's
                level.append(c)
                self._owned.add(id(c))
        for parent in level:  # which grows
            if len(parent) > _MANY or isinstance(parent, set):
                continue
            way, owned = self._known[id(parent)], id(parent) in self._owned
            for key, x in parent.items() if isinstance(parent, dict) else enumerate(parent):
                if id(x) in self._containers and id(x) not in self._known:
                    self._known[id(x)] = (way, _item, key)
                    level.append(x)
                    if owned:
                        self._owned.add(id(x))

    def to(self, c: Any) -> Any:
        """One that holds nothing, else the container, or ``None`` if it leads to a tape."""
        way = self._known.get(id(c))
        if way is not None:
            return way
        if self._to_a_tape is None:
            others = (one for key, one in self._containers.items() if key not in self._known)
            self._to_a_tape = leads_to_a_tape(others)
        return None if id(c) in self._to_a_tape else Held(c)

    def is_owned(self, c: Any) -> bool:
        """Whether its way begins at an object, and in no cell. NOTE [what counts runs]."""
        return id(c) in self._owned


def _first(found: Reached, containers: dict[int, Any]) -> Iterator[tuple[Step, Any]]:
    """Containers that objects, globals and hooks hold themselves."""
    classes = [one for one, _ in found.attributes if isinstance(one, type)]
    for o in (*found.objects, *found.modules, *classes):
        yield from _of(Attributes(o), o.__dict__.items(), containers)
    for o, slots in found.attributes:
        if not isinstance(o, type):
            attributes = Attributes(o)
            held = [(name, attributes.get(name, None)) for name in slots]
            yield from _of(attributes, held, containers)
    for variable in found.rare:
        if type(variable) is ContextVar and id(x := variable.get(None)) in containers:
            yield (lambda v=variable: v, _of_context, None), x
    for scope, names in found.named:
        for name in names:
            if id(x := scope.get(name)) in containers:
                yield (scope, _item, name), x
    for hook in found.hooks:
        for i, cell in enumerate(getattr(hook, "__closure__", None) or ()):
            if id(x := content(cell)) in containers:
                yield (weakref.ref(hook), _cell, i), x


def _of(
    attributes: Attributes, held: Iterable[tuple[str, Any]], containers: dict[int, Any]
) -> Iterator[tuple[Step, Any]]:
    those = [(name, x) for name, x in held if id(x) in containers]
    if those and attributes.may_be_known():
        for name, x in those:
            yield (attributes, _attribute, name), x


def leads_to_a_tape(containers: Iterable[Any]) -> set[int]:
    """The ids of those, and of the ones in them, that lead to a tensor which was computed."""
    found = reached(containers)
    within: dict[int, list[int]] = {}  # by its id, the containers that something is in
    stack = []
    for key, c in found.items():
        for x in elements(c):
            if id(x) in found:
                within.setdefault(id(x), []).append(key)
            elif isinstance(x, Tensor) and x.grad_fn is not None:
                stack.append(key)
    leading: set[int] = set()
    while stack:
        key = stack.pop()
        if key not in leading:
            leading.add(key)
            stack += within.get(key, ())
    return leading


class Followed:
    """The containers that ways lead to now, each step of them taken once."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # by the id of a way

    def to(self, way: Any) -> Any:
        """The one that a way leads to; ``None`` if it is gone."""
        steps = []
        while isinstance(way, tuple) and id(way) not in self._known:
            steps.append(way)
            way = way[0]
        if id(way) in self._known:
            at = self._known[id(way)]
        elif isinstance(way, (dict, Attributes)):
            at = way
        else:
            at = way()
        for step in reversed(steps):
            try:
                at = None if at is None else step[1](at, step[2])
            except (LookupError, TypeError):
                at = None
            self._known[id(step)] = at
        return at
