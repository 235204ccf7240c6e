"""The flat lists of guards that each call checks, and of slots from which it reads tensors (J3).

A check runs at every call, so it must take microseconds even for a large model. All guards of one
kind are therefore stored as columns of equal length, which one pass of C code (``map``) compares
without a Python call for each guard. Values are compared by identity: this never calls ``__eq__``
of user classes or tensors, and it keeps 1, 1.0 and True apart.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor

from functx._compile.search import CELL, CODE, FIXED, ITEM, Search

_ERRORS = KeyError, IndexError, ValueError, AttributeError, TypeError
_is, _get, _call = operator.is_, operator.getitem, operator.call
_attribute = object.__getattribute__  # not the method of a user class, which may run any code


class Guards:
    """The guards and slots of a search, as columns."""

    def __init__(self, found: Search, weakly: Container[int] = ()) -> None:
        """``weakly`` has the ids of objects that the caller compares itself, by weak references.

        Guards on them would hold references that keep these objects alive.
        """
        kinds = [k for k in found.kinds if id(k[0]) not in weakly]
        own = [k for k in found.own if id(k[0]) not in weakly]
        cells = [r[1:] for r in found.reads if r[0] is CELL]
        codes = [r[1:] for r in found.reads if r[0] is CODE]
        reads = [r for r in found.reads if r[0] not in (CELL, CODE)]
        checks: list[Any] = [
            (_are_falsy, _columns(found.falsy)),
            (_are_empty, (tuple(found.empty),) if found.empty else ()),
            (_have_lengths, _columns(found.lengths)),
            (_hold, _columns(found.items)),
            (functools.partial(_give, type), _columns(kinds)),
            (_have_attributes, _columns(own)),
            (functools.partial(_give, CELL), _columns(cells)),
            (functools.partial(_give, CODE), _columns(codes)),
            (_have_keys, _columns(found.orders)),
            (_read, _columns(reads)),
            (_are_absent, _columns(found.absent)),
            (_are_equal, _columns(found.values)),
        ]
        self._checks: Any = [(check, columns) for check, columns in checks if columns]
        self._slots(found)

    def _slots(self, found: Search) -> None:
        """Note where tensors are read: each from its first place. Other places are compared."""
        firsts = [(slots[0], number) for number, slots in enumerate(found.slots)]
        items = [(place, n) for place, n in firsts if place[0] is ITEM]
        reads = [(place, n) for place, n in firsts if place[0] is not ITEM]
        self._has_tensors = bool(firsts)
        self._in_items = _columns([place[1:] for place, _ in items]) or ((), ())
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
        self._same_items = _columns(same) or ((), (), ())
        self._same_reads = tuple(
            (first, second, n) for (how, first, second), n in others if how not in (ITEM, FIXED)
        )

    def read(self) -> Sequence[Tensor] | None:
        """The tensors of the state, or ``None`` if a guard does not hold."""
        try:
            for check, columns in self._checks:
                if not check(*columns):
                    return None
            return self._tensors() if self._has_tensors else ()
        except _ERRORS:
            return None

    def _tensors(self) -> Sequence[Tensor] | None:
        tensors: list[Any] = [*map(_get, *self._in_items)]
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


def _columns(rows: Sequence[Any]) -> tuple[Any, ...]:
    """Transpose rows to columns. No rows give an empty tuple."""
    return tuple(zip(*rows))


def _are_falsy(boxes: Any, keys: Any) -> bool:
    return not any(map(_get, boxes, keys))


def _are_empty(boxes: Any) -> bool:
    return not any(boxes)


def _have_lengths(boxes: Any, lengths: Any) -> bool:
    return (*map(len, boxes),) == lengths


def _hold(boxes: Any, keys: Any, values: Any) -> bool:
    return all(map(_is, map(_get, boxes, keys), values))


def _give(function: Any, objects: Any, values: Any) -> bool:
    return all(map(_is, map(function, objects), values))


def _have_attributes(objects: Any, spaces: Any) -> bool:
    return all(map(_is, map(_attribute, objects, itertools.repeat("__dict__")), spaces))


def _have_keys(boxes: Any, keys: Any) -> bool:
    return all(map(operator.eq, map(tuple, boxes), keys))


def _read(functions: Any, objects: Any, values: Any) -> bool:
    return all(map(_is, map(_call, functions, objects), values))


def _are_absent(spaces: Any, names: Any) -> bool:
    return not any(map(operator.contains, spaces, names))


def _are_equal(functions: Any, objects: Any, values: Any) -> bool:
    return (*map(_call, functions, objects),) == values
