"""What each thread or task has its own of: attributes of `threading.local`, context variables.

A replay may run in another thread than its forward (that of a GPU always does), and when the task
that the forward ran in has ended. It finds what the forward found; what it sets is gone afterwards.
An attribute that code of the region does not name, and the forward leaves as it is, is not kept: it
may be large. Of a container a copy is kept, if what it holds leads nowhere; of another one, or an
object, nothing: results of the region may be put there later, and nothing could free a node that
holds what holds its result. Where there is nothing in its place, a replay finds nothing.
"""

from __future__ import annotations

import contextvars
import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from functx._errors import ReplayError
from functx._remat._arguments import SIMPLE
from functx._remat._code_names import BY_ANY_NAME
from functx._remat._containers import MUTABLE
from functx._remat._contents import value
from functx._remat._parts_of_given import is_object
from functx._remat._reached import Reached

_MANY = 1024
_MISSING = object()
_AS_IT_IS = object()

Runner = Callable[..., Any]
"""Calls a function with some arguments."""


class _Container(NamedTuple):
    """One that was there: a copy of it as it was, if that may be kept."""

    key: int
    copy: Any


class _Object:
    """One that was there, weakly."""

    __slots__ = ("get",)

    def __init__(self, x: Any) -> None:
        self.get = weakref.ref(x)


class PerThread:
    """What a forward found of it.

    Attributes that it changes are among those of `_module_state`, too.

    Args:
        found: what the function can reach, of which some is such.
    """

    __slots__ = ("_before", "_copies", "_locals", "_reached", "_set", "_variables")

    def __init__(self, found: Reached) -> None:
        self._reached: Reached | None = found
        self._before = [
            (x, dict(x.__dict__)) for x in found.rare if issubclass(type(x), threading.local)
        ]
        self._locals: list[tuple[weakref.ref[Any], dict[str, Any]]] = []
        self._variables = [
            (v, v.get(_MISSING)) for v in found.rare if type(v) is contextvars.ContextVar
        ]
        there = [x for _, own in self._before for x in own.values()]
        there += [was for _, was in self._variables]
        self._copies = {id(x): _copy_of(x) for x in there if type(x) in MUTABLE}
        self._set = False  # whether the forward sets any of these

    def seal(self, written: set[int]) -> None:
        """The forward ended.

        Args:
            written: ids of tensors that were written to in place, which replays have copies of.
        """
        assert self._reached is not None
        names = self._reached.names() if self._before else set[str]()
        every = not BY_ANY_NAME.isdisjoint(names)
        for one, before in self._before:
            now = one.__dict__
            changed = {n for n, x in before.items() if now.get(n, _MISSING) is not x}
            kept = {
                name: self._kept(x) if every or name in names or name in changed else _AS_IT_IS
                for name, x in before.items()
            }
            self._locals.append((weakref.ref(one), kept))
        for v, was in self._variables:
            now = v.get(_MISSING)
            self._set = self._set or now is not was or id(now) in written
        self._variables = [(v, self._kept(was)) for v, was in self._variables]
        self._before, self._reached, self._copies = [], None, {}

    def _kept(self, x: Any) -> Any:
        if type(x) in MUTABLE:
            return _Container(id(x), self._copies.get(id(x)))
        return _weakly(x)

    def differs(self) -> bool:
        """Whether it is something else here and now, or a run sets variables."""
        return self._set or any(self._otherwise()) or any(self._to_bind())

    def _otherwise(self) -> Iterator[Any]:
        return (v for v, was in self._variables if _differ(v.get(_MISSING), was))

    def _to_bind(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Attributes that are others here than they were, with what they were."""
        for known, before in self._locals:
            if (one := known()) is not None:
                own = one.__dict__
                for name in own.keys() | before.keys():
                    was = before.get(name, _MISSING)
                    if _differ(own.get(name, _MISSING), was):
                        yield own, name, was

    @contextmanager
    def restored(self, region: str) -> Iterator[Runner | None]:
        """As the forward found it; gives what runs the body, if it can't be just called.

        Args:
            region: its name.

        Raises:
            ReplayError: what the forward found was not kept.
        """
        there = [(one.__dict__, dict(one.__dict__)) for r, _ in self._locals if (one := r())]
        to_bind, run = [*self._to_bind()], None
        if self._set or any(self._otherwise()):
            run = self._context(region).run
        for own, name, was in to_bind:
            what = f"the attribute {name!r} of a threading.local"
            _bind(own, name, _found(was, own.get(name, _MISSING), what, region))
        try:
            yield run
        finally:
            for own, now in there:
                for name in own.keys() | now.keys():
                    _bind(own, name, now.get(name, _MISSING))

    def _context(self, region: str) -> contextvars.Context:
        """As here, with what the forward found of those variables."""
        context, before = contextvars.Context(), dict(self._variables)
        for v, now in contextvars.copy_context().items():
            if before.get(v) is not _MISSING:
                context.run(v.set, now)
        for v in self._otherwise():
            now = v.get(_MISSING)
            found = _found(before[v], now, f"the context variable {v.name!r}", region)
            if found is not _MISSING:
                context.run(v.set, found)
        return context


def _copy_of(c: Any) -> Any:
    """A copy of a container, if what it holds leads nowhere."""
    if len(c) > _MANY:
        return None
    values = [*c.values(), *c] if isinstance(c, dict) else [*c]
    return copy.copy(c) if all(map(_leads_nowhere, values)) else None


def _leads_nowhere(x: Any) -> bool:
    return type(x) in SIMPLE or (isinstance(x, Tensor) and x.grad_fn is None)


def _weakly(x: Any) -> Any:
    """What may be kept: an object of the user's may hold results of the region."""
    if not is_object(x):
        return value(x)
    try:
        return _Object(x)
    except TypeError:  # it has no weak references
        return value(x)


def _differ(now: Any, was: Any) -> bool:
    if type(was) is _Container:
        return id(now) != was.key
    if type(was) is _Object:
        return now is not was.get()
    return now is not was and was is not _AS_IT_IS


def _found(was: Any, now: Any, what: str, region: str) -> Any:
    """What was there; or nothing, as now, where that is not kept.

    Raises:
        ReplayError: something else is there, which the region would read or write to.
    """
    if type(was) is _Object and (one := was.get()) is not None:
        return one
    if type(was) is _Container and was.copy is not None:
        return copy.copy(was.copy)
    if type(was) not in (_Container, _Object):
        return was
    if now is not None and now is not _MISSING:
        raise ReplayError(
            f"remat: the region {region!r} reads {what}, which held an object or a container that "
            "results may be put into, and now holds another one: of another thread or task, or set "
            "since. Pass it to the region, or run the backward pass where the forward ran."
        )
    return now


def _bind(own: dict[str, Any], name: str, x: Any) -> None:
    if x is _MISSING:
        own.pop(name, None)
    else:
        own[name] = x
