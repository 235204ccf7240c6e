"""What a forward changes in modules, objects, lists, dicts and globals: ``self.calls += 1``.

What a region counts, it counts once. The first run notes which attributes, buffers, entries and
globals that it can reach it has changed, and what they were before. A replay starts from there, and
puts back what it found.

NOTE [containers that a node knows]
A list may hold what has left the region: a result of the very node that knows the list, which
nothing could free. So a node knows a list by the way to it, from the globals of a function or from
an object that it knows weakly, or the hook of a module; if there is no such way, as from a cell of
the body, the copies of `_containers` are what replays write to.

NOTE [what counts runs]
A list or a dict of a function's own cells and globals with no tensors in it (``runs.append(1)``) is
left to replays as it is, and so it says how often the function ran. Where what the function
computes depends on it, a replay departs from its forward, which is an error.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from functx import _torch_modules
from functx._remat._containers import MUTABLE, elements, reached
from functx._remat._contents import Grown, Length, Ours, add, copy_of, fill, value, values
from functx._remat._slots import slots_of
from functx._remat._within_reach import Reached

_MISSING = object()
# So many entries are remembered, of all containers together; of a list beyond that, how long it is.
_MANY = 8192
_replaying = threading.RLock()  # modules are shared; two replays must not rebind them at once

# Says in models of transformers that hooks were installed. A replay does not take them away, and
# would install them again.
_DONE_ONCE = frozenset({"_output_capturing_hooks_installed"})

# A dict of a module, or an object known weakly; a key of it, and what was bound there.
Change = tuple[Any, str, Any]


class ModuleState:
    """What was bound before a run, and what it changed.

    Attributes:
        changes: of attributes and globals, with what they were.
        contents: of containers: the way to each, what it held, and what was put there.
        lost: those to which there is none, by id, until the call has ended.
    """

    __slots__ = ("_before", "_containers", "_found", "changes", "contents", "lost")

    def __init__(self, found: Reached) -> None:
        self._found: Reached | None = found
        self._before: list[tuple[Any, dict[str, Any]]] = [
            (d, dict(d)) for m in found.modules for d in (m.__dict__, _torch_modules.buffers_of(m))
        ]
        for o in found.objects:
            self._before.append((o.__dict__, dict(o.__dict__)))
        for scope, names in found.scopes:
            self._before.append((scope, _of(scope, names)))
        for one, names in found.attributes:
            d = _Attributes(one)
            self._before.append((d, _of(d, names)))
        self._containers = [*_remembered(found.containers)]
        self.changes: list[Change] = []
        self.contents: list[tuple[Any, int, Any, Grown]] = []
        self.lost: dict[int, tuple[Any, Any]] = {}

    def seal(self, written: set[int], ours: Ours) -> None:
        """The first run ended.

        Args:
            written: ids of tensors that were written to in place. ``self.calls += 1`` writes, and
                binds the result to the name it had; in a replay, that is the replay's own copy.
            ours: whether it has made a tensor, or was given it.
        """
        assert self._found is not None
        first_scope = len(self._before) - len(self._found.scopes) - len(self._found.attributes)
        for i, (d, before) in enumerate(self._before):
            if i >= first_scope:
                keys: Any = before.keys()
            # In C, for most: the same names in the same order, bound to the same.
            elif not written and _same(d, before):
                continue
            else:
                keys = before.keys() | d.keys()
            for key in keys:
                if key in _DONE_ONCE:
                    continue
                was, now = before.get(key, _MISSING), d.get(key, _MISSING)
                if was is not now or id(now) in written:
                    if isinstance(d, _Attributes) and not d.may_be_known():
                        continue
                    self.changes.append((self._known_weakly(d), key, value(was)))
        for c, before in self._containers:
            if isinstance(before, Length):
                if not before.grown(c):
                    continue
            elif _same_contents(c, before) and not _holds(c, written):
                continue
            way = _Ways(self._found).to(c, set())
            if way is None:
                if not isinstance(before, Length):
                    self.lost[id(c)] = c, values(before)
            elif _is_owned(way) or _has_tensors(c) or _has_tensors(before):
                grown = Grown(c, before, ours)
                self.contents.append((way, id(c), values(before), grown))
        self._before = self._containers = []
        self._found = None

    def changed(self) -> bool:
        """Whether the run changed anything."""
        return bool(self.changes or self.contents)

    def _known_weakly(self, d: dict[str, Any]) -> Any:
        assert self._found is not None
        for o in self._found.objects:
            if o.__dict__ is d:
                return _weakly(o)
        return d

    @contextmanager
    def restored(self, name: str, ours: Ours | None) -> Iterator[None]:
        """As the first run found it; put back afterwards, with what others put there meanwhile.

        Args:
            name: of the region.
            ours: whether the replay has made a tensor, or was given it, if it knows.
        """
        if not self.changed():
            yield
            return
        with _replaying:
            changes = [
                (d, key, was) for d, key, was in map(_found_again, self.changes) if d is not None
            ]
            now = [(d, key, d.get(key, _MISSING)) for d, key, _ in changes]
            ways = [(_follow(way), key, *rest) for way, key, *rest in self.contents]
            containers = [
                (c, was.tail(c) if isinstance(was, Length) else copy_of(c), was, grown)
                for c, key, was, grown in ways
                if id(c) == key
            ]
            _bind(changes)
            for c, _, was, _ in containers:
                fill(c, was)
            whole = False
            try:
                yield
                whole = True
            finally:
                _bind(now)
                with ExitStack() as rest:  # all of them are put back, whatever one raises
                    for those in containers:
                        rest.callback(_put_back, *those, name, ours, whole)


def _put_back(
    c: Any, held: Any, was: Any, grown: Grown, name: str, ours: Ours | None, whole: bool
) -> None:
    """Let a container hold what it held before a replay, and what others have put there since."""
    try:
        others = grown.others(c, was, ours, name) if whole else []
    finally:
        if isinstance(was, Length):
            was.put(c, held)
        else:
            fill(c, held)
    add(c, others)


class _Attributes:
    """Those of an object, by name, that are in no dict: in slots, or of a class."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        try:
            self._of: Any = weakref.ref(of)
        except TypeError:
            self._of = of

    def _object(self) -> Any:
        return self._of() if isinstance(self._of, weakref.ref) else self._of

    def may_be_known(self) -> bool:
        """Whether a node may know the object: it is not held, or holds nothing of a tape."""
        one = self._of
        if isinstance(one, weakref.ref):
            return True
        held = [getattr(one, name, None) for name in slots_of(type(one))]
        found = (x for c in reached([held]).values() for x in elements(c))
        return not any(isinstance(x, Tensor) and x.grad_fn is not None for x in found)

    def get(self, name: str, default: Any) -> Any:
        """The value of an attribute; of a class, its own."""
        one = self._object()
        if isinstance(one, type):
            return one.__dict__.get(name, default)
        return getattr(one, name, default)

    def pop(self, name: str, default: Any) -> None:
        """Take an attribute away."""
        if self.get(name, default) is not default:
            delattr(self._object(), name)

    def __setitem__(self, name: str, value: Any) -> None:
        one = self._object()
        if isinstance(one, type):
            setattr(one, name, value)
        elif one is not None:
            object.__setattr__(one, name, value)


def _found_again(change: Change) -> Change:
    d, key, was = change
    if isinstance(d, weakref.ref):
        d = getattr(d(), "__dict__", None)
    return d, key, was


def _bind(changes: Iterable[Change]) -> None:
    for d, key, bound in changes:
        if bound is _MISSING:
            d.pop(key, None)
        else:
            d[key] = bound


def _of(scope: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: scope.get(name, _MISSING) for name in names}


def _remembered(containers: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    left = _MANY
    for c in containers:
        left -= len(c)
        if left >= 0:
            yield c, copy_of(c)
        else:
            left += len(c)
            if type(c) is list:
                yield c, Length(c)


def _same(d: Any, before: Any) -> bool:
    return (
        len(d) == len(before)
        and all(map(operator.is_, before, d))
        and all(map(operator.is_, before.values(), d.values()))
    )


def _same_contents(c: Any, before: Any) -> bool:
    if isinstance(c, dict):
        return _same(c, before)
    return len(c) == len(before) and all(map(operator.is_, before, c))


def _holds(c: Any, ids: set[int]) -> bool:
    return bool(ids) and any(id(x) in ids for x in elements(c))


def _weakly(o: Any) -> Any:
    """A reference to an object; its attributes themselves, where there is no such reference."""
    try:
        return weakref.ref(o)
    except TypeError:
        return o.__dict__


class _Ways:
    """The ways to containers. NOTE [containers that a node knows]."""

    def __init__(self, found: Reached) -> None:
        self._found = found

    def to(self, c: Any, seen: set[int]) -> Any:
        """One that holds nothing, else the container, or ``None`` if it leads to a tape."""
        if id(c) in seen:
            return None
        seen.add(id(c))
        classes = [one for one, _ in self._found.attributes if isinstance(one, type)]
        for o in (*self._found.objects, *self._found.modules, *classes):
            for name, x in o.__dict__.items():
                if x is c:
                    return (_weakly(o), name)
        for scope, names in self._found.named:
            for name in names:
                if scope.get(name) is c:
                    return (scope, name)
        for hook in self._found.hooks:
            for i, cell in enumerate(getattr(hook, "__closure__", None) or ()):
                if _content(cell) is c:
                    return (weakref.ref(hook), i)
        for parent in self._found.containers:
            for key, x in parent.items() if isinstance(parent, dict) else enumerate(parent):
                if x is c and not isinstance(parent, set):
                    way = self.to(parent, seen)
                    if way is not None and not isinstance(way, _Held):
                        return (way, key)
        if type(c) not in MUTABLE and type(c).__weakrefoffset__:  # of a class of the user's
            return weakref.ref(c)
        tensors = (x for one in reached([c]).values() for x in elements(one))
        if any(isinstance(x, Tensor) and x.grad_fn is not None for x in tensors):
            return None
        return _Held(c)


def _is_owned(way: Any) -> bool:
    """Whether it begins at an object, and in no cell. NOTE [what counts runs]."""
    key: Any = ""
    while isinstance(way, tuple):
        way, key = way
    return isinstance(way, weakref.ref) and isinstance(key, str)


def _has_tensors(c: Any) -> bool:
    return any(isinstance(x, Tensor) for x in elements(c))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


class _Held:
    """A container in no object and no global."""

    def __init__(self, container: Any) -> None:
        self.container = container


def _follow(way: Any) -> Any:
    """The container that a way leads to now."""
    if isinstance(way, _Held):
        return way.container
    if isinstance(way, weakref.ref):
        return way()
    start, key = way
    if isinstance(start, weakref.ref):
        one = start()
        if isinstance(key, int):  # a cell of a hook
            return None if one is None else _content(one.__closure__[key])
        start = getattr(one, "__dict__", None)
    elif isinstance(start, tuple):
        start = _follow(start)
    try:
        return start[key]
    except (LookupError, TypeError):
        return None
