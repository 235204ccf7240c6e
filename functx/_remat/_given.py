"""Lists, dicts and objects that a region is given: what its body changes in them, the caller finds.

NOTE [changed arguments]
A region's arguments are taken apart, and its body gets containers of its own. What it has changed
in them when it returns is a further part of its result: the tensors come out behind the region's
node as results do, at every level, and are put into the caller's containers then. A replay has
containers of its own again, as they were at the call, so nothing is appended twice.

What the body's containers hold is taken out of them as soon as it has returned (`_Place` stands for
a tensor), since whatever still holds a tensor then has let it leave the region.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any

from torch import Tensor

from functx import _tree
from functx._errors import RematError
from functx._places import describe_place, where
from functx._remat._by_name import named_by
from functx._remat._parts_of_given import (
    BUILT_IN,
    OF_PYTHON,
    Path,
    at,
    become,
    is_container,
    is_object,
    is_same,
    parts_of,
    remade,
    same_state,
    set_part,
    state_of,
    with_part,
)


class _Place:
    """Stands where a tensor is."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Taken:
    """An object that is made anew from its parts."""

    __slots__ = ("parts", "spec")

    def __init__(self, parts: list[Any], spec: Any) -> None:
        self.parts = parts
        self.spec = spec


class Given:
    """The containers among the arguments of a call.

    Args:
        args: of the call, and keyword arguments: both are the call's own, as Python makes them.
        f: the user's function, which may reach them in other ways as well.
        name: of the region.
    """

    def __init__(self, args: tuple[Any, dict[str, Any]], f: Any, name: str) -> None:
        self.name = name
        self._paths: list[Path] = []
        self._aliases: list[tuple[Path, Path]] = []
        self._changed: Sequence[int] = ()  # known once the first run has ended
        self._loose: set[int] = set()
        self._first: Any = f, self._find(args)
        self._taken: Any = None
        self._count = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._paths)

    def _find(self, args: Any) -> list[tuple[Any, Any]]:
        """The caller's containers, each with what it holds."""
        seen: dict[int, Path] = {}
        found = []
        inner: set[int] = set()  # ids of what is made anew with an object that it is in, perhaps
        loose: set[int] = set()  # those of objects without parts, and of what is in these
        stack: list[tuple[Path, Any]] = [((1,), args[1]), ((0,), args[0])]
        while stack:
            path, one = stack.pop()
            if not isinstance(one, tuple) and path != (1,):
                if id(one) in seen:
                    self._aliases.append((path, seen[id(one)]))
                    continue
                seen[id(one)] = path
                self._paths.append(path)
                found.append((one, state_of(one)))
            parts = [*parts_of(one)]
            if id(one) in inner or not (type(one) in OF_PYTHON or isinstance(one, tuple)):
                those = [x for _, x in parts if is_container(x) or is_object(x)]
                inner.update(map(id, those))
                in_loose = id(one) in loose
                loose.update(id(x) for x in those if in_loose or not is_container(x))
            stack += [((*path, k), x) for k, x in parts if is_container(x) or id(x) in inner]
        self._loose = loose
        return found

    def apart(self, args: Any) -> Any:
        """Arguments for a run, with each container once, however often it was given."""
        for path, first in self._aliases:
            args = with_part(args, path, at(args, first))
        return args

    def watch(self, args: Any) -> list[tuple[Any, Any]]:
        """The containers that a run is given; for the first, with what they hold."""
        first = self._first is not None
        found = [at(args, path) for path in self._paths]
        if first and self._loose:  # those that are made anew, with what they are in
            callers = [c for c, _ in self._first[1]]
            keep = [m is not t or id(t) not in self._loose for m, t in zip(found, callers)]
            found, self._paths = [*compress(found, keep)], [*compress(self._paths, keep)]
            self._first = self._first[0], [*compress(self._first[1], keep)]
        return [(c, state_of(c) if first else None) for c in found]

    def own(self, watched: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
        """By the id of a container of a run: that, and what the caller has.

        Args:
            watched: what `watch` gave.
        """
        if self._first is None:
            return {id(c): (c, c) for c, _ in watched}
        return {id(c): (c, theirs) for (c, _), (theirs, _) in zip(watched, self._first[1])}

    def take(
        self,
        watched: list[Any],
        own: dict[int, tuple[Any, Any]],
        outs: Sequence[Any] = (),
        exchange: Any = None,
        kept: Collection[int] = (),
    ) -> list[Tensor]:
        """A run has ended: the tensors in what it has changed, which has places for them now.

        Args:
            watched: what `watch` gave; it is emptied.
            own: what `own` gave.
            outs: what the run returned, flat.
            exchange: what is done about those that the first run has stored. `_stored`.
            kept: ids of those that a replay has stored, which are left as they are.
        """
        first, self._first = self._first, None
        if first is not None:
            self._changed = changed(watched)
            self._refuse_other_ways(first[0], first[1], self._changed)
            if exchange is not None:
                exchange(watched, own, outs)
        taking = _Taking(own)
        for i in self._changed:
            c = watched[i][0]
            taking.fill(copy.copy(c) if id(c) in kept and type(c) in OF_PYTHON else c)
        if first is not None and self._changed:
            self._taken = taking.seen, [(watched[i][0], first[1][i][0]) for i in self._changed]
            self._count = len(taking.tensors)
        watched.clear()
        return taking.tensors

    def interrupted(self, watched: list[tuple[Any, Any]], error: BaseException) -> None:
        """The body raised: what it had changed is in the caller's, unless it computed it."""
        f, callers = self._first or (None, ())
        if not callers:
            return
        own = self.own(watched)
        known = {
            id(mine): t
            for (_, before), (_, theirs) in zip(watched, callers)
            for mine, t in zip(before[1], theirs[1])
            if isinstance(mine, Tensor)
        }
        for i in changed(watched):
            taking = _Taking(own)
            taking.fill(watched[i][0])
            if all(id(t) in known for t in taking.tensors):
                putting = _Putting([known[id(t)] for t in taking.tensors], taking.seen)
                become(callers[i][0], putting.fill(watched[i][0]))
        if {id(theirs) for theirs, _ in callers} & named_by(f):
            error.add_note(
                f"functx: the region {self.name!r} is given a container as an argument that it "
                "reaches in another way too (a closure, a global, an attribute). In one of the two "
                "it does not see what it changes in the other. Let it reach it in one way only."
            )

    def _refuse_other_ways(self, f: Any, callers: Sequence[Any], changed: Sequence[int]) -> None:
        meant = {id(callers[i][0]) for i in changed}
        if meant:
            meant &= named_by(f)
        meant |= {
            id(theirs) for theirs, before in callers if not same_state(before, state_of(theirs))
        }
        for theirs, _ in callers:
            if id(theirs) in meant:
                raise RematError(
                    f"remat: the region {self.name!r}, called at {describe_place(where())}, "
                    f"changes a {type(theirs).__name__} that it is given as an argument, and "
                    "reaches the same one in another way too (a closure, a global, an attribute). "
                    "In one of the two it would not see the change. Let it reach the "
                    f"{type(theirs).__name__} in one way only."
                )

    def put_back(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The call has ended: its changes are made in the caller's containers.

        Args:
            tensors: what came out of the region.

        Returns:
            Those that are what the function returned.
        """
        if self._taken is None:
            return tensors
        n = len(tensors) - self._count
        (seen, pairs), self._taken = self._taken, None
        putting = _Putting(tensors[n:], seen)
        # First all that was made in the run, which these may hold.
        for theirs, mine in [(theirs, putting.fill(mine)) for mine, theirs in pairs]:
            become(theirs, mine)
        return tensors[:n]


def changed(watched: Sequence[tuple[Any, Any]]) -> list[int]:
    """Which containers hold something else than they did, of pairs of these and their state."""
    return [i for i, (c, before) in enumerate(watched) if not same_state(before, state_of(c))]


class _Walk:
    """Goes through containers, and exchanges what they hold, in place; tuples are made anew."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def fill(self, c: Any) -> Any:
        """``c``, with something else in it."""
        self.seen[id(c)] = c
        for key, x in [*parts_of(c)]:
            if (new := self.of(x)) is not x:
                set_part(c, key, new)
        return c

    def of(self, x: Any) -> Any:
        """What is in the place of ``x``."""
        if isinstance(x, tuple) and _tree.is_node(x):
            parts = [self.of(part) for part in x]
            return x if all(map(is_same, parts, x)) else remade(x, parts)
        return self.fill(x) if id(x) not in self.seen and self.goes_into(x) else x

    def goes_into(self, x: Any) -> bool:
        """Whether ``x`` is a container, and can be changed in place."""
        raise NotImplementedError


class _Taking(_Walk):
    """Takes tensors out."""

    def __init__(self, own: dict[int, Any]) -> None:
        super().__init__()
        self._own = own
        self.tensors: list[Tensor] = []
        self._places: dict[int, _Place] = {}

    def of(self, x: Any) -> Any:
        """A place for a tensor; and the caller's container for that of the run."""
        if isinstance(x, Tensor):
            place = self._places.get(id(x))
            if place is None:
                place = self._places[id(x)] = _Place(len(self.tensors))
                self.tensors.append(x)
            return place
        if id(x) in self._own:
            return self._own[id(x)][1]
        if isinstance(x, BUILT_IN) and type(x) not in OF_PYTHON and _tree.is_node(x):
            parts, spec = _tree.flatten(x)
            return _Taken([self.of(part) for part in parts], spec)
        return super().of(x)

    def goes_into(self, x: Any) -> bool:
        """Whether it is one that functx knows how to change."""
        return is_container(x) and not isinstance(x, tuple)


class _Putting(_Walk):
    """Puts tensors in, where they were taken out."""

    def __init__(self, tensors: Sequence[Any], taken: dict[int, Any]) -> None:
        super().__init__()
        self._tensors = tensors
        self._taken = taken

    def of(self, x: Any) -> Any:
        """The tensor for a place."""
        if type(x) is _Place:
            return self._tensors[x.number]
        if type(x) is _Taken:
            return _tree.unflatten(x.spec, [self.of(part) for part in x.parts])
        return super().of(x)

    def goes_into(self, x: Any) -> bool:
        """As where they were taken out."""
        return id(x) in self._taken
