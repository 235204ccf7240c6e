"""Iterators, queues and files that a region reaches: each run takes what comes next, or adds to it.

What a forward has taken from, a replay finds as the forward found it: a copy is in its place while
that runs, and the program's own is left alone. A copy shares with the original what that goes
through, and copies the iterators that it is made of. A file that is read is wound back, and forward
again. What can't be copied (a generator) and has moved is an error, and so is what a replay comes
by in a way that is not known (in a tuple): the original has moved in that replay.

A queue may hold the same before and after a forward that took what came meanwhile. So each has a
copy, which waits for nothing: nobody would put anything there. Where other threads are alive, which
put and take while a replay runs, what they may find is left alone (the queue that an attribute or a
global is): a replay does there what it does once more. What a function closes over is the replay's.

An attribute counts if code of the region names it. Nobody else's code is asked for anything: what
iterates over a class of the user's can't be copied.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import itertools
import queue
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from functx._errors import ReplayError
from functx._remat._contents import value
from functx._remat._really_held import OF_OWNERS, QUEUES

_PYTHONS = frozenset({"builtins", "itertools", "_collections", "_io", "_queue", "queue"}) | {
    "asyncio.queues"
}
_OWN_ITERATORS = frozenset({list, tuple, dict, set, frozenset, str, bytes, bytearray, range})
_MANY = 1024
_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None), range})
_METHODS = (*OF_OWNERS, types.MethodType)
# Copies of these are made of a list of all that is left.
_DICT: dict[Any, Any] = {}
_VIEWS: tuple[Any, ...] = (_DICT.keys(), _DICT.values(), _DICT.items())
_COUNTED = frozenset(map(type, (iter(set[Any]()), *map(iter, _VIEWS), *map(reversed, _VIEWS))))
_TEE: Any = type(itertools.tee(())[0])
_WARNS = sys.version_info >= (3, 12)


def moves(kind: type) -> bool:
    """Whether runs take something from objects of such a class, if it is one of Python's."""
    return kind in QUEUES or issubclass(kind, Iterator) or issubclass(kind, io.IOBase)


def _is_pythons(kind: type) -> bool:
    """Whether it runs no code of the user's when it is asked what it is made of."""
    return moves(kind) and kind.__module__ in _PYTHONS


def owner_of(x: Any) -> Any:
    """What a bound method is of; anything else as it is."""
    return x.__self__ if type(x) in _METHODS else x


class NotPutBackError(ReplayError):
    """A replay would find something elsewhere than its forward did, or otherwise.

    Args:
        what: the message.
        remedy: the end of it, where that is known.
    """

    def __init__(self, what: str, remedy: str | None = None) -> None:
        super().__init__(what)
        self.remedy = remedy


class Advanced:
    """Those within reach: where they were before a run, and which it has moved.

    Attributes:
        there: by id, what is in the place of each while a replay runs.
    """

    __slots__ = ("_alone", "_before", "_files", "_moved", "_stuck", "there")

    def __init__(self, found: Iterable[Any]) -> None:
        self._moved: list[tuple[Any, Any]] = []
        self._files: list[tuple[Any, int]] = []
        self._stuck: list[str] = []
        self._alone = True
        self.there: dict[int, Any] = {}
        memo: dict[int, Any] = {}
        self._before = [(x, _mark(x), _copy_of(x, memo)) for x in found]

    def seal(self) -> None:
        """The run ended: what it left where it was is not kept."""
        before, self._before = self._before, []
        for x, mark, start in before:
            in_queue = type(x) in QUEUES
            if start is None if in_queue else mark is None or _mark(x) == mark:
                continue
            if isinstance(x, io.IOBase):
                if _position(x) is None:
                    self._stuck.append(_kind_of(x))
                else:
                    self._files.append((x, mark[0]))
            elif start is None:
                self._stuck.append(_kind_of(x))
            else:
                self._moved.append((x, start))

    def any(self) -> bool:
        """Whether the run has moved any."""
        return bool(self._moved or self._files or self._stuck)

    def ids(self) -> set[int]:
        """Those that copies stand for."""
        return {id(x) for x, _ in self._moved}

    def now(self, x: Any) -> Any:
        """What stands for something in a replay, where other threads may find it as well."""
        if (found := self.there.get(id(owner_of(x)))) is None:
            return x
        if not self._alone and type(owner_of(x)) in QUEUES:
            return x
        return getattr(found, x.__name__) if type(x) in _METHODS else found

    @contextmanager
    def restored(self, region: str) -> Iterator[None]:
        """Where they were.

        Raises:
            NotPutBackError: one can't be put there.
        """
        if self._stuck:
            raise _not_again(region, f"{self._stuck[0]}, which can't be copied")
        memo: dict[int, Any] = {}
        self.there.update({id(x): _copy_of(start, memo) for x, start in self._moved})
        # Other threads may put something into a queue, or take it.
        alone = self._alone = threading.active_count() == 1
        those = [x for x, _ in self._moved if alone or type(x) not in QUEUES]
        marks = [*map(_mark, those)]
        ends = [(file, file.tell()) for file, _ in self._files]
        for file, position in self._files:
            file.seek(position)
        try:
            yield
        finally:
            self.there.clear()
            for file, position in ends:
                file.seek(position)
        for x, mark in zip(those, marks):
            if _mark(x) != mark:
                raise _not_again(region, f"{_kind_of(x)}, in a way that replays don't know")


def _kind_of(x: Any) -> str:
    name = getattr(x, "__qualname__", None) or getattr(x, "name", None)
    return f"a {type(x).__name__}" + (f" ({name})" if isinstance(name, str) else "")


def _not_again(region: str, what: str) -> NotPutBackError:
    return NotPutBackError(f"remat: the region {region!r} takes from, or adds to, {what}.")


class _Is:
    """Equal to what is of the same object, which is not held if that is a tensor."""

    __slots__ = ("_of",)

    def __init__(self, x: Any) -> None:
        self._of = weakref.ref(x) if isinstance(x, Tensor) else lambda: x

    def __eq__(self, other: object) -> bool:
        mine = self._of()
        return isinstance(other, _Is) and mine is not None and mine is other._of()

    __hash__ = None  # type: ignore[assignment]


def _mark(x: Any) -> Any:
    """Where something is, to be compared; ``None`` where that can't be told."""
    try:
        found = _where(x, set())
        return found if _where(x, set()) == found else None  # made of others at each look
    except Exception:  # of an object that does anything when it is asked
        return None


def _where(x: Any, around: set[int]) -> Any:
    kind = type(x)
    if kind in _SIMPLE:
        return kind, x
    if id(x) in around or not (kind is tuple or _is_pythons(kind)):
        return _Is(x)
    if kind is tuple and len(x) > _MANY:  # what many are chosen from
        return len(x), _Is(x[0]), _Is(x[-1])
    around = around | {id(x)}
    if kind is tuple:
        return [_where(part, around) for part in x]
    if issubclass(kind, io.IOBase):
        if x.writable() and not isinstance(x, io.StringIO | io.BytesIO):
            return None
        return (_position(x),)
    if kind in QUEUES:
        return [_Is(part) for part in _items(x)]
    if kind in _COUNTED:
        return x.__length_hint__()
    if kind is types.GeneratorType:
        frame = x.gi_frame
        if frame is None:
            return None, None
        held = [part for part in gc.get_referents(x) if type(part) is not types.FrameType]
        return frame.f_lasti, [_where(part, around) for part in held]
    return [_where(part, around) if type(part) is not list else _listed(part) for part in _made(x)]


def _listed(x: list[Any]) -> Any:
    return (_Is(x), len(x)) if x else 0  # which one that has ended makes anew


def _made(x: Any) -> Sequence[Any]:
    """What an iterator of Python's is made of, and its state, laid out."""
    if type(x) is _TEE:
        return x.__reduce__()[2]
    with _silent():
        made = x.__reduce__()
    state = made[2] if len(made) > 2 else None
    state = state if isinstance(state, tuple) else (state,)
    return (*made[1], *state)


@contextmanager
def _silent() -> Iterator[None]:
    """Python 3.12 warns that it will not tell what iterators are made of."""
    if not _WARNS:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _position(file: Any) -> int | None:
    try:
        return file.tell()
    except (OSError, ValueError):  # it can't tell, or is closed
        return None


def _items(q: Any) -> list[Any]:
    """What is in a queue."""
    if type(q) is asyncio.Queue:
        return [*vars(q)["_queue"]]
    if type(q) is not queue.SimpleQueue:
        if not q.mutex.acquire(blocking=False):  # by who calls the region
            raise RuntimeError("the queue is locked")
        try:
            return [*q.queue]
        finally:
            q.mutex.release()
    held = gc.get_referents(q)
    n = q.qsize()
    if sys.version_info < (3, 13):
        return [*held[0][len(held[0]) - n :]] if n else []
    return [part for part in held if part is not type(q)]


class _Queue:
    """What was in a queue."""

    __slots__ = ("_items", "_kind", "_unfinished")

    def __init__(self, q: Any) -> None:
        self._kind, self._items = type(q), [*map(value, _items(q))]
        self._unfinished = getattr(q, "unfinished_tasks", 0)

    def again(self) -> Any:
        """A queue that holds it, and never waits."""
        if self._kind is queue.SimpleQueue:
            new: Any = _NeverWaits()
        else:
            new = self._kind()
        for x in self._items:
            new.put_nowait(x)
        if self._kind is not queue.SimpleQueue and self._kind is not asyncio.Queue:
            new.unfinished_tasks = self._unfinished
            new.not_empty.wait = new.all_tasks_done.wait = _refuse_to_wait
        return new


class _NeverWaits(queue.SimpleQueue[Any]):
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if block and self.empty():
            _refuse_to_wait()
        return super().get(False)


def _refuse_to_wait(timeout: float | None = None) -> Any:
    raise ReplayError(
        "remat: a replay takes more from a queue than was in it when the forward began, so it "
        "would wait for ever. Take from the queue outside of the region, and pass what it gave."
    )


def _copy_of(x: Any, memo: dict[int, Any]) -> Any:
    """A copy that goes on from where it is; ``None`` if there is none."""
    try:
        return _copied(x, memo)
    except Exception:  # as above
        return None


def _copied(x: Any, memo: dict[int, Any]) -> Any:
    if id(x) in memo:
        return memo[id(x)][1]
    kind = type(x)
    if kind is _Queue:
        new = x.again()
    elif kind in QUEUES:
        new = _Queue(x)
    elif kind is _TEE:
        new = copy.copy(x)
    elif issubclass(kind, io.IOBase):
        raise TypeError("a file")
    else:
        if not _is_pythons(kind) or (kind in _COUNTED and x.__length_hint__() > _MANY):
            raise TypeError("a copy runs code of the user's, or takes long")
        with _silent():
            make, args, *rest = x.__reduce__()
        if make is iter and type(args[0]) not in _OWN_ITERATORS:
            raise TypeError("a class of the user's")
        new = make(*(_part(a, memo) for a in args))
        if rest and rest[0] is not None:
            new.__setstate__(_state(rest[0], memo))
    memo[id(x)] = x, new
    return new


def _part(x: Any, memo: dict[int, Any]) -> Any:
    if type(x) is tuple:
        return tuple(_part(part, memo) for part in x)
    return _copied(x, memo) if moves(type(x)) else x


def _state(x: Any, memo: dict[int, Any]) -> Any:
    """Likewise; a list there is the iterator's own."""
    if type(x) is tuple:
        return tuple([*part] if type(part) is list else _part(part, memo) for part in x)
    return _part(x, memo)
