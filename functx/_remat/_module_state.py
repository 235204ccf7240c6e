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
A list or a dict of a function's own cells and globals with nothing in it but numbers, names and the
like (``runs.append(1)``) is left to replays as it is, and so it says how often the function ran.
Where what the function computes depends on it, a replay departs from its forward: an error.
"""

from __future__ import annotations

import enum
import functools
import operator
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from functx import _torch_modules
from functx._remat._advanced import owner_of
from functx._remat._arguments import SIMPLE
from functx._remat._callers_own import Own, put_back
from functx._remat._containers import MUTABLE, elements, reached
from functx._remat._contents import (
    Grown,
    Length,
    Ours,
    add,
    copy_of,
    fill,
    value,
    values,
    with_others,
)
from functx._remat._module_hooks import ModuleHooks
from functx._remat._per_thread import Runner
from functx._remat._rare import Rare
from functx._remat._reached import Reached
from functx._remat._ways import Attributes, Followed, Ways

_MISSING = object()
# So many entries are remembered, of all containers together; of a list beyond that, how long it is.
_MANY = 8192
_replaying = threading.RLock()  # modules are shared; two replays must not rebind them at once

# A dict of a module, or an object known weakly; a key of it, and what was bound there.
Change = tuple[Any, str, Any]


class ModuleState:
    """What was bound before a run, and what it changed.

    Attributes:
        changes: of attributes and globals, with what they were.
        contents: of containers: the way to each, what it held, and what was put there.
        lost: those to which there is none, by id, until the call has ended.
        hooks: of modules.
    """

    __slots__ = (
        *("_before", "_containers", "_found", "_objects", "_rare"),
        *("changes", "contents", "lost", "hooks"),
    )

    def __init__(self, found: Reached) -> None:
        self._found: Reached | None = found
        self._before: list[tuple[Any, dict[str, Any]]] = [
            (d, dict(d)) for m in found.modules for d in (m.__dict__, _torch_modules.buffers_of(m))
        ]
        # A run may give an object another dict.
        self._objects = [(o, dict(o.__dict__)) for o in found.objects] if found.objects else []
        for scope, names in found.scopes:
            self._before.append((scope, _of(scope, names)))
        for one, names in found.attributes:
            d = Attributes(one)
            self._before.append((d, _of(d, names)))
        self._containers = [*_remembered(found.containers)]
        self._rare = Rare(found) if found.rare else None
        self.changes: list[Change] = []
        self.contents: list[tuple[Any, int, Any, Grown]] = []
        self.lost: dict[int, tuple[Any, Any]] = {}
        self.hooks = ModuleHooks(found.modules) if found.modules else None

    def seal(self, written: set[int], ours: Ours, own: Own) -> Set[int]:
        """The first run ended.

        Args:
            written: ids of tensors that were written to in place. ``self.calls += 1`` writes, and
                binds the result to the name it had; in a replay, that is the replay's own copy.
            ours: whether it has made a tensor, or was given it.
            own: the caller's tensor for what stands for it in the run.

        Returns:
            Ids of the tensors in what it changed.
        """
        assert self._found is not None
        changed: list[tuple[Any, Any]] = []
        if self._rare is not None:
            self._rare.seal(written)
        if not (self._before or self._objects or self._containers or self._rare):
            self._found = None
            return frozenset()
        if self.hooks is not None:
            self.hooks.seal()
        first_scope = len(self._before) - len(self._found.scopes) - len(self._found.attributes)
        for i, (d, before) in enumerate(self._before):
            if i >= first_scope:
                keys: Any = before.keys()
            # In C, for most: the same names in the same order, bound to the same.
            elif not written and _same(d, before):
                continue
            else:
                keys = before.keys() | d.keys()
            for key, was in _bound_otherwise(d, before, keys, written):
                changed.append((d, key))
                if not isinstance(d, Attributes) or d.may_be_known():
                    self.changes.append((d, key, value(was)))
        for o, before in self._objects:
            d = o.__dict__
            if written or not _same(d, before):
                those = [*_bound_otherwise(d, before, before.keys() | d.keys(), written)]
                self.changes += [(_weakly(o), key, value(was)) for key, was in those]
                changed += [(d, key) for key, _ in those]
        ways: Ways | None = None
        for c, before in self._containers:
            if isinstance(before, Length):
                if not before.grown(c):
                    continue
            elif _same_contents(c, before) and not _holds(c, written):
                continue
            changed.append((c, None))
            ways = ways or Ways(self._found)
            way = ways.to(c)
            if way is None:
                if not isinstance(before, Length):
                    self.lost[id(c)] = c, values(before)
            elif ways.is_owned(c) or not (_counts(c) and _counts(before)):
                grown = Grown(c, before, ours)
                self.contents.append((way, id(c), values(before), grown))
        if self._rare is not None and (moved := self._rare.advanced.ids()):
            self._note_holders(moved, ours)
        stored: Set[int] = put_back(changed, own) if changed else frozenset()
        self._before, self._objects, self._containers = [], [], []
        self._found = None
        return stored

    def _note_holders(self, moved: set[int], ours: Ours) -> None:
        """What holds an iterator that the run has moved: a replay puts another one there."""
        assert self._found is not None

        def holds(x: Any) -> bool:
            return id(owner_of(x)) in moved

        held: list[Any] = [(scope, scope, names) for scope, names in self._found.named]
        held += [(d, before, before) for d, before in self._before]
        held += [(_weakly(o), before, before) for o, before in self._objects]
        for known, d, names in held:
            self.changes += [(known, n, x) for n in [*names] if holds(x := d.get(n))]
        ways, noted = Ways(self._found), {key for _, key, *_ in self.contents}
        for c, before in self._containers:
            if id(c) in noted or not any(map(holds, elements(before))):
                continue
            if (way := ways.to(c)) is not None:
                self.contents.append((way, id(c), values(before), Grown(c, before, ours)))

    def changed(self) -> bool:
        """Whether the run changed anything, or this thread has other things than it had."""
        return (
            bool(self.changes or self.contents)
            or (self._rare is not None and self._rare.differs())
            or (self.hooks is not None and self.hooks.differ())
        )

    @contextmanager
    def restored(self, name: str, ours: Ours | None) -> Iterator[Runner | None]:
        """As the first run found it; put back afterwards, with what others put there meanwhile.

        Gives what runs the body, if it can't be just called.

        Args:
            name: of the region.
            ours: whether the replay has made a tensor, or was given it, if it knows.
        """
        if not self.changed():
            yield None
            return
        with _replaying, ExitStack() as stack:
            run: Runner | None = None
            changes, contents = self.changes, self.contents
            if self._rare is not None:
                run = stack.enter_context(self._rare.restored(name))
                there = self._rare.advanced.now
                changes = [(known, key, there(bound)) for known, key, bound in changes]
                contents = [(*c[:2], with_others(c[2], there), c[3]) for c in contents]
            now = [
                (known, key, d.get(key, _MISSING))
                for known, key, _ in changes
                if (d := _found_again(known)) is not None
            ]
            followed = Followed()
            # A way may begin at a context variable, whose value is that of the forward in there.
            to = followed.to if run is None else functools.partial(run, followed.to)
            ways = [(to(way), key, *rest) for way, key, *rest in contents]
            containers = [
                (c, was.tail(c) if isinstance(was, Length) else copy_of(c), was, grown)
                for c, key, was, grown in ways
                if id(c) == key
            ]
            if self.hooks is not None and self.hooks.differ():
                stack.enter_context(self.hooks.restored())
            _bind(changes)
            for c, _, was, _ in containers:
                fill(c, was)
            whole = False
            try:
                yield run
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


def _found_again(known: Any) -> Any:
    """The dict that is there now; ``None`` if the object is gone."""
    return getattr(known(), "__dict__", None) if isinstance(known, weakref.ref) else known


def _bind(changes: Iterable[Change]) -> None:
    for known, key, bound in changes:
        d = _found_again(known)
        if d is not None and bound is _MISSING:
            d.pop(key, None)
        elif d is not None:
            d[key] = bound


def _weakly(o: Any) -> Any:
    """A reference to an object; its attributes themselves, where there is no such reference."""
    try:
        return weakref.ref(o)
    except TypeError:
        return o.__dict__


def _bound_otherwise(
    d: Any, before: Mapping[str, Any], keys: Iterable[str], written: set[int]
) -> Iterator[tuple[str, Any]]:
    """Names bound to something else now, or to what was written to, and to what they were."""
    for key in keys:
        was, now = before.get(key, _MISSING), d.get(key, _MISSING)
        if was is not now or id(now) in written:
            yield key, was


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


def _counts(c: Any) -> bool:
    """Whether a container holds nothing but numbers, names and the like, itself or in others."""
    return all(
        type(x) in _OF_NO_STATE or isinstance(x, _NAMES)
        for one in reached([c]).values()
        for x in elements(one)
    )


_OF_NO_STATE = SIMPLE | MUTABLE | {tuple, torch.Size, bytes, range}
_NAMES = (type, weakref.ref, enum.Enum)
