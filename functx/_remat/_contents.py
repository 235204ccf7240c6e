"""What containers hold: before a run, after it, and what other threads put there meanwhile.

NOTE [put there by others]
A container that a body changes is as it was while a replay runs, and afterwards as it was found.
What another thread puts there in between has to stay. A tensor is another's if the replay has
neither made it nor been given it (``NOTE [of a run]`` in `_of_a_run`), nor the forward has put it
there. Of anything else, what is more than the forward has put there is another's. Where that does
not tell what is whose, it is an error.
In a dict it is the keys that tell. Who reads a container while another thread replays a region that
changes it, finds what that replay does; and so it is with attributes and globals that are rebound,
which are what they were when the replay has ended.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from functx._errors import RematError
from functx._remat._containers import elements, reached

Ours = Callable[[Tensor], bool]
"""Whether a run has made a tensor, or was given it."""

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def value(x: Any) -> Any:
    """Its value only: a tape of the step before must not live on in this one."""
    if not isinstance(x, Tensor) or x.grad_fn is None:
        return x
    try:
        return x.detach()
    except RuntimeError:  # a wrapper of levels that have ended, or are not entered here
        return x


class Length:
    """Of a long list: what is behind was appended."""

    __slots__ = ("_last", "_length")

    def __init__(self, c: list[Any]) -> None:
        self._length, self._last = len(c), id(c[-1])

    def grown(self, c: list[Any]) -> bool:
        """Whether something was appended, and that alone as far as can be told."""
        return len(c) > self._length and id(c[self._length - 1]) == self._last

    def tail(self, c: list[Any]) -> list[Any]:
        """What was appended."""
        return c[self._length :]

    def put(self, c: list[Any], tail: Iterable[Any]) -> None:
        """Let that be behind."""
        c[self._length :] = tail

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def values(c: Any) -> Any:
    """The values alone of what a container holds."""
    if isinstance(c, Length):
        return c
    return {k: value(x) for k, x in c.items()} if isinstance(c, dict) else [*map(value, c)]


def with_others(held: Any, now: Callable[[Any], Any]) -> Any:
    """What a container held, with others in the places of some."""
    if isinstance(held, Length):
        return held
    return {k: now(x) for k, x in held.items()} if isinstance(held, dict) else [*map(now, held)]


def copy_of(c: Any) -> Any:
    """What a container holds: a dict or a list."""
    return dict(c) if isinstance(c, dict) else list(c)


def fill(c: Any, contents: Any) -> None:
    """Let a container hold that."""
    if isinstance(contents, Length):
        contents.put(c, ())
        return
    c.clear()
    if hasattr(c, "extend"):
        c.extend(contents)
    else:
        c.update(contents)


class Grown:
    """What a run has put into a container.

    Args:
        c: the container, after the run.
        before: what it held.
        ours: of the run.
    """

    __slots__ = ("_keys", "_kinds", "_unknown")

    def __init__(self, c: Any, before: Any, ours: Ours) -> None:
        put = _put(c, before)
        self._kinds: Counter[Any] | None = None
        if put is None:
            return
        unknown = {key: _unknown(x, ours) for key, x in put.items()}
        self._kinds = Counter(_kind(x, unknown[key]) for key, x in put.items())
        self._keys = frozenset(put) if isinstance(c, dict) else None
        # From outside, as a parameter; unseen, as by NumPy; or another thread's.
        self._unknown = [weakref.ref(t) for those in unknown.values() for t in those]

    def others(self, c: Any, before: Any, ours: Ours | None, name: str) -> list[tuple[Any, Any]]:
        """What others have put there while a replay ran: ``NOTE [put there by others]``.

        Args:
            c: the container, after the replay.
            before: what it held when that began.
            ours: of the replay, if that knows.
            name: of the region.

        Returns:
            Pairs of a key, or a place, and what is there.
        """
        if self._kinds is None or (put := _put(c, before)) is None:
            return []
        if self._keys is not None:
            return [
                pair
                for pair in put.items()
                if len(put) > len(self._keys) and pair[0] not in self._keys
            ]
        if threading.active_count() == 1 and len(put) <= sum(self._kinds.values()):
            return []  # there is nobody else, whatever the replay knows of what it has put there
        unknown = {key: [] if ours is None else _unknown(x, ours) for key, x in put.items()}
        before_too = {*map(id, (ref() for ref in self._unknown))}
        # The forward's are all there again: what else is unknown, the body has not put there.
        now = {id(t) for those in unknown.values() for t in those}
        explained = before_too <= now
        # Or there is nobody else, and it makes as many unseen, new ones each time.
        gone = [ref for ref in self._unknown if (t := ref()) is None or id(t) not in now]
        its_own = len(now - before_too) <= len(gone) and threading.active_count() == 1
        theirs, by_kind = set[Any](), dict[Any, list[Any]]()
        for key, x in put.items():
            fresh = [t for t in unknown[key] if id(t) not in before_too]
            if not fresh:
                by_kind.setdefault(_kind(x, unknown[key]), []).append(key)
            elif explained or any(t.grad_fn is not None for t in fresh):
                theirs.add(key)
            elif not its_own:
                raise _not_told(c, name)
        for kind, keys in by_kind.items():
            if (more := len(keys) - self._kinds[kind]) > 0:
                if len(keys) > more and not isinstance(kind, tuple):
                    raise _not_told(c, name)
                theirs.update(keys[-more:])  # of equal ones, it is no matter which
        return [(key, x) for key, x in put.items() if key in theirs]


def _not_told(c: Any, name: str) -> RematError:
    return RematError(
        f"remat: while the region {name!r} was replayed, another thread put something into a "
        f"{type(c).__name__} that the region changes, too, and what is whose can't be told. Hold a "
        "lock around backward passes and around whatever else writes there, give each thread a "
        "container of its own, or return from the region what it puts there."
    )


def add(c: Any, those: Iterable[tuple[Any, Any]]) -> None:
    """Put into a container what others had put there."""
    for key, x in those:
        if isinstance(c, dict):
            c[key] = x
        elif isinstance(c, set):
            c.add(x)
        else:
            c.append(x)


def _put(c: Any, before: Any) -> dict[Any, Any] | None:
    """What was put into a container, by key or place; ``None`` where more than that happened."""
    held = copy_of(c)
    if isinstance(before, Length):
        return dict(enumerate(before.tail(held)))
    if isinstance(held, dict):
        return {k: x for k, x in held.items() if k not in before or before[k] is not x}
    if isinstance(c, set):
        was = {*map(id, before)}
        return {id(x): x for x in held if id(x) not in was}
    n = len(before)
    if len(held) < n or any(a is not b for a, b in zip(before, held)):
        return None
    return dict(enumerate(held[n:]))


def _kind(x: Any, unknown: Sequence[Tensor]) -> Any:
    """What two things are alike in; by a tuple, one can stand for the other."""
    if unknown and isinstance(x, Tensor):
        return "from outside", id(x)
    return (type(x), x) if isinstance(x, _SIMPLE) else type(x)


def _unknown(x: Any, ours: Ours) -> list[Tensor]:
    """The tensors, in a container perhaps, that a run has neither made nor been given."""
    if isinstance(x, Tensor):
        return [] if ours(x) else [x]
    if isinstance(x, (list, tuple, dict, set, deque)):
        those = (t for one in reached([x]).values() for t in elements(one))
        return [t for t in those if isinstance(t, Tensor) and not ours(t)]
    return []
