"""The flat list that a call checks, and where it reads the tensors of the state (J3).

Each kind of guard is a few columns of one length, so that a check is one pass of C code without a
Python call for each guard. Everything is compared by identity: the methods ``__eq__`` of users and
of tensors are never called, and 1, 1.0 and True stay apart.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor

from functx._compile.search import CELL, CODE, FIXED, ITEM, Search

_ERRORS = KeyError, IndexError, ValueError, AttributeError, TypeError
_is, _get, _call = operator.is_, operator.getitem, operator.call  # type: ignore[attr-defined]


class Guards:
    """What a search has found, as columns."""

    def __init__(self, found: Search, weakly: Container[int] = ()) -> None:
        """``weakly`` are the ids of objects that the caller compares, and which may die."""
        self._falsy = _columns(found.falsy, 2)
        self._empty = tuple(found.empty)
        self._lengths = _columns(found.lengths, 2)
        self._orders = _columns(found.orders, 2)
        self._items = _columns(found.items, 3)
        self._kinds = _columns([k for k in found.kinds if id(k[0]) not in weakly], 2)
        self._cells = _columns([r[1:] for r in found.reads if r[0] is CELL], 2)
        self._codes = _columns([r[1:] for r in found.reads if r[0] is CODE], 2)
        self._reads = _columns([r for r in found.reads if r[0] not in (CELL, CODE)], 3)
        self._absent = _columns(found.absent, 2)
        self._values = tuple(found.values)
        self._slots(found)

    def _slots(self, found: Search) -> None:
        """Where tensors are: the first place of each is read, the others must hold the same."""
        firsts = [(slots[0], number) for number, slots in enumerate(found.slots)]
        items = [(place, n) for place, n in firsts if place[0] is ITEM]
        reads = [(place, n) for place, n in firsts if place[0] is not ITEM]
        self._in_items = _columns([place[1:] for place, _ in items], 2)
        self._in_reads = tuple(
            (_fixed, first) if how is FIXED else (first, second)
            for (how, first, second), _ in reads
        )
        numbers = [n for _, n in (*items, *reads)]
        self._order: Any = None
        if numbers != [*range(len(numbers))]:
            at = {n: i for i, n in enumerate(numbers)}
            self._order = operator.itemgetter(*(at[n] for n in range(len(numbers))))
        others = [(place, n) for n, slots in enumerate(found.slots) for place in slots[1:]]
        same = [(first, second, n) for (how, first, second), n in others if how is ITEM]
        self._same_items = _columns(same, 3)
        self._same_reads = tuple(
            (first, second, n) for (how, first, second), n in others if how not in (ITEM, FIXED)
        )

    def read(self) -> Sequence[Tensor] | None:
        """The tensors of the state, or ``None`` where something is not what it was."""
        try:
            if any(map(_get, *self._falsy)) or any(self._empty):
                return None
            boxes, expected = self._lengths
            if (*map(len, boxes),) != expected:
                return None
            boxes, keys, values = self._items
            if not all(map(_is, map(_get, boxes, keys), values)):
                return None
            objects, kinds = self._kinds
            if not all(map(_is, map(type, objects), kinds)):
                return None
            boxes, values = self._cells
            if not all(map(_is, map(CELL, boxes), values)):
                return None
            functions, codes = self._codes
            if not all(map(_is, map(CODE, functions), codes)):
                return None
            boxes, keys = self._orders
            if not all(map(operator.eq, map(tuple, boxes), keys)):
                return None
            functions, objects, values = self._reads
            if not all(map(_is, map(_call, functions, objects), values)):
                return None
            spaces, names = self._absent
            if any(map(operator.contains, spaces, names)):
                return None
            for function, x, value in self._values:
                if function(x) != value:
                    return None
            return self._tensors()
        except _ERRORS:
            return None

    def _tensors(self) -> Sequence[Tensor] | None:
        tensors = [*map(_get, *self._in_items)]
        for function, x in self._in_reads:
            tensors.append(function(x))
        if self._order is not None:
            tensors = [*self._order(tensors)]
        boxes, keys, numbers = self._same_items
        if numbers and not all(map(_is, map(_get, boxes, keys), map(tensors.__getitem__, numbers))):
            return None
        for function, x, n in self._same_reads:
            if function(x) is not tensors[n]:
                return None
        return tensors


def _fixed(t: Tensor) -> Tensor:
    return t


def _columns(rows: Sequence[Any], width: int) -> tuple[Any, ...]:
    """Rows of one width, as columns."""
    return tuple(zip(*rows)) if rows else ((),) * width
