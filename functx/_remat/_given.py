"""Containers among the arguments: what a body writes into them is in the caller's.

NOTE [containers given]
A list with tensors in it can't be handed to a body: it gets one with stand-ins, made anew for each
run. What the first run has written into that (``aux.append(h)``, ``cache["k"] = k``) goes into the
caller's when the body has ended, tensors that way leave the region (`_leaving`). Containers without
tensors are the caller's own in the first run. A replay begins with what they all held at the call,
and what it writes is gone with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from functx import _tree

_LISTS = (list, deque)


_SIMPLE = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})


def has_containers(values: Iterable[Any]) -> bool:
    """Whether there may be some among arguments."""
    return any(type(x) not in _SIMPLE for x in values)


class Given:
    """The caller's containers beside the body's.

    Args:
        given: arguments as the caller has them.
        made: the same with stand-ins for tensors, of containers made anew.
        again: this is no first run, to which the caller's are given where they have no tensors.
    """

    def __init__(self, given: Any, made: Any, *, again: bool = False) -> None:
        self._pairs: dict[int, tuple[Any, Any]] = {}  # by the id of the caller's
        self._again = again
        self._shared = False
        self._seen = 0  # tensors, and containers that were there before
        self._tensors: dict[int, tuple[Tensor, Any]] = {}  # by the id of the body's
        self.arguments = self._joined(given, made)
        self._before = [
            (theirs, own, _contents(own), dict(_attributes(own)))
            for theirs, own in self._pairs.values()
            if theirs is not own
        ]

    def skeleton(self, given: Any, spec: Any, statics: Iterable[Any]) -> Any:
        """What replays need: arguments without tensors, where one container is there twice."""
        if not self._shared:
            return None
        return Given(given, _tree.unflatten(spec, statics), again=True).arguments

    def _joined(self, theirs: Any, own: Any) -> Any:
        """``own``, with one container wherever ``theirs`` has one."""
        if isinstance(theirs, Tensor) or isinstance(own, Tensor):
            self._tensors[id(own)] = own, theirs
            self._seen += 1
            return own
        if theirs is own:
            return own
        if isinstance(theirs, tuple):
            parts = [self._joined(a, b) for a, b in zip(theirs, own)]
            if all(map(_is, parts, own)):
                return own
            return own._make(parts) if hasattr(own, "_make") else type(own)(parts)
        if id(theirs) in self._pairs:
            self._shared = True
            self._seen += 1
            return self._pairs[id(theirs)][1]
        self._pairs[id(theirs)] = theirs, own
        before = self._seen
        if isinstance(theirs, dict):
            self._join_all(theirs, own, theirs)
        elif isinstance(theirs, _LISTS):
            self._join_all(theirs, own, range(len(theirs)))
        attributes = _attributes(theirs)
        self._join_all(attributes, _attributes(own), attributes)
        if self._seen == before and not self._again:
            self._pairs[id(theirs)] = theirs, theirs
            return theirs
        return own

    def _join_all(self, theirs: Any, own: Any, keys: Iterable[Any]) -> None:
        for key in keys:
            try:
                part = own[key]
            except LookupError:
                continue
            new = self._joined(theirs[key], part)
            if new is not part:
                own[key] = new

    def write_back(self) -> None:
        """The body has run: the caller's containers are as it left its own."""
        changed = [
            (theirs, own, contents, attributes)
            for theirs, own, contents, attributes in self._before
            if not (_same(_contents(own), contents) and _same(_attributes(own), attributes))
        ]
        if changed:
            back = _Back(
                self._tensors | {id(own): (own, theirs) for theirs, own, *_ in self._before}
            )
            for theirs, own, contents, attributes in changed:
                if isinstance(own, _LISTS):
                    if not _same(_contents(own), contents):
                        now = [back(x) for x in own]
                        theirs.clear()
                        theirs.extend(now)
                elif isinstance(own, dict):
                    _update(theirs, own, contents, back)
                _update(_attributes(theirs), _attributes(own), attributes, back)
        self._before, self._pairs, self._tensors = [], {}, {}


def _attributes(c: Any) -> dict[str, Any]:
    return getattr(c, "__dict__", {})


def _contents(c: Any) -> dict[Any, Any]:
    if isinstance(c, dict):
        return dict(c)
    return dict(enumerate(c)) if isinstance(c, _LISTS) else {}


def _same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    """The same keys in the same order, bound to the same."""
    return len(a) == len(b) and all(
        i == j and x is y for (i, x), (j, y) in zip(a.items(), b.items())
    )


def _update(theirs: dict[Any, Any], own: Any, before: Any, back: Callable[[Any], Any]) -> None:
    """Make the changes to a dict that a body has made to its own."""
    if _same(own, before):
        return
    for key in before:
        if key not in own:
            del theirs[key]
    for key, x in own.items():
        if key not in before or before[key] is not x:
            theirs[key] = back(x)
    if [*theirs] != [*own]:
        now = dict(theirs)
        for key in own:
            theirs[key] = theirs.pop(key, now[key])


class _Back:
    """From what a body was given to what the caller has.

    Args:
        theirs: by the id of the body's, that (so that the id stays its own) and the caller's.
    """

    def __init__(self, theirs: dict[int, tuple[Any, Any]]) -> None:
        self._theirs = theirs

    def __call__(self, x: Any) -> Any:
        found = self._theirs.get(id(x))
        if found is not None:
            return found[1]
        kind = type(x)
        if kind is tuple:
            parts = [self(part) for part in x]
            return x if all(map(_is, parts, x)) else tuple(parts)
        if kind is list or kind is dict:  # made by the body: what it was given may be in there
            self._theirs[id(x)] = x, x
            for key, part in [*(x.items() if kind is dict else enumerate(x))]:
                if (new := self(part)) is not part:
                    x[key] = new
        return x


def _is(a: Any, b: Any) -> bool:
    return a is b
