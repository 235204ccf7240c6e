"""A container that a body was given, and stores elsewhere: ``self.cache = cache``.

The body has containers of its own (``NOTE [changed arguments]`` in `_given`). One of them that is
still held when the body has returned was stored: whoever has it is given the caller's in its place.
It is found by its number of references, so what stores nothing is not searched for.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from functx._errors import RematError
from functx._remat._given import changed
from functx._remat._parts_of_given import is_container, parts_of, same_state, state_of
from functx._remat._state_of_hooks import told


class Stored:
    """What a body is about to be given.

    Args:
        watched: containers of a first run, each with what it holds.
        args: of the run, and keyword arguments.
        name: of the region.
    """

    def __init__(self, watched: Sequence[tuple[Any, Any]], args: Sequence[Any], name: str) -> None:
        self._args, self._name = args, name
        self._before = _references(watched)

    def kept(self, watched: Sequence[tuple[Any, Any]]) -> Collection[int]:
        """What a first run keeps is not looked at."""
        return ()

    def exchange(
        self,
        watched: Sequence[tuple[Any, Any]],
        own: dict[int, tuple[Any, Any]],
        outs: Iterable[Any],
    ) -> None:
        """The body has returned: what it has stored is now the caller's.

        Args:
            watched: as above.
            own: by the id of a container of the run: that, and what the caller has.
            outs: what the body returned, flat.
        """
        args = self._args
        known = _known(watched, own, outs)
        now = _references(watched)
        within: set[int] = set()
        for i, pair in enumerate(watched):
            if now[i] - self._before[i] > known[id(pair[0])]:
                ours = {id(watched), id(own), id(outs), id(args), *map(id, args)}
                ours |= {*map(id, watched), *map(id, own.values()), *(id(s) for _, s in watched)}
                ours |= {id(s[1]) for _, s in watched} | {id(c) for c, _ in watched}
                ours |= {id(getattr(c, "__dict__", None)) for c, _ in watched}
                within = within or _within(watched)
                theirs = own[id(pair[0])][1]
                try:
                    _exchange(pair[0], theirs, ours | within, self._name)
                    continue
                except RematError:
                    pass  # and nothing of it is held
                gc.collect()  # a function that calls itself holds what it closes over till then
                _exchange(pair[0], theirs, ours | within, self._name)


class _Pending(threading.local):
    # Containers of replays whose tapes are not pulled back yet, with what they held, and a name.
    those: list[tuple[Any, Any, str]] | None = None


pending = _Pending()


class Kept:
    """What a replay is about to be given: what is kept of it may change in the backward pass.

    A custom Function keeps a list on its ``ctx``, or a hook closes over it. It is the replay's own;
    what they leave there is put in the caller's where they are seen to reach it (`_bound`).
    """

    exchange = None  # nothing

    def __init__(self, watched: Sequence[tuple[Any, Any]], name: str) -> None:
        self._before, self._name = _references(watched), name

    def kept(self, watched: Sequence[tuple[Any, Any]]) -> set[int]:
        """The body has returned: ids of what is kept."""
        counts = zip(watched, self._before, _references(watched))
        kept = [pair[0] for pair, before, now in counts if now > before]
        if kept:
            found = [(c, state_of(c), self._name) for c in kept]
            pending.those = [*(pending.those or ()), *found]
            told.changed = told.changed or []
        return {id(c) for c in kept}


def refuse_changed() -> None:
    """Tapes were pulled back: raise if what they keep has changed by that."""
    those, pending.those = pending.those, None
    changed, told.changed = told.changed or (), None
    for c, before, name in those or ():
        if not _is_in(c, changed) and not same_state(before, state_of(c)):
            raise RematError(
                f"remat: the region {name!r} is given a {type(c).__name__} as an argument, which a "
                "custom Function or a hook of it keeps and changes in a backward pass. It has its "
                "own in replays, and the caller's would not change. Let the function close over "
                f"the {type(c).__name__}, or keep it in an attribute of an object."
            )


def _known(
    watched: Sequence[tuple[Any, Any]], own: Collection[int], outs: Iterable[Any]
) -> dict[int, int]:
    """How many references more there are of each, of those that are no matter."""
    known = dict.fromkeys(own, 1)  # `own` has each once
    for out in outs:
        if id(out) in known:
            known[id(out)] += 2  # in the list, and in what was returned
    if changed(watched):
        for c, (_, before) in watched:
            for x in before:
                if id(x) in known:
                    known[id(x)] -= 1
            for _, x in parts_of(c):
                if id(x) in known:
                    known[id(x)] += 1
    return known


def _references(watched: Sequence[tuple[Any, Any]]) -> list[int]:
    return [sys.getrefcount(pair[0]) for pair in watched]


def _exchange(mine: Any, theirs: Any, ours: Collection[int], name: str) -> None:
    # No function in here: its cell would be one of those that hold it.
    for holder in gc.get_referrers(mine):
        if id(holder) in ours or isinstance(holder, types.FrameType):
            continue
        own = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(own, dict) and _is_in(mine, own.values()):
            for key, x in [*own.items()]:
                if x is mine:
                    own[key] = theirs
        elif isinstance(holder, (list, deque)):
            for i, x in enumerate(holder):
                if x is mine:
                    holder[i] = theirs
        elif isinstance(holder, types.CellType):
            holder.cell_contents = theirs
        elif not isinstance(holder, tuple) or _is_kept(holder, ours):
            raise RematError(
                f"remat: the region {name!r} stores a {type(mine).__name__} that it is given as "
                f"an argument in a {type(holder).__name__}. What it was given is the region's own "
                "there, and the caller's would not change with it. Store it in an attribute, a "
                "list or a dict, or outside of the region."
            )


def _is_in(x: Any, values: Iterable[Any]) -> bool:
    return any(one is x for one in values)


def _within(watched: Iterable[tuple[Any, Any]]) -> set[int]:
    """Ids of what given containers hold, which is exchanged as they are."""
    found: set[int] = set()
    stack = [c for c, _ in watched]
    while stack:
        for _, x in parts_of(stack.pop()):
            if id(x) not in found and is_container(x):
                found.add(id(x))
                stack.append(x)
    return found


def _is_kept(t: Any, ours: Collection[int]) -> bool:
    """Whether anything but a call that is under way holds a tuple."""
    kinds = (dict, list, deque, tuple, types.CellType)
    those = [x for x in gc.get_referrers(t) if id(x) not in ours]
    return any(isinstance(x, kinds) or hasattr(x, "__dict__") for x in those)
