"""Lists, dicts and sets that a body writes tensors into: without these, and fresh for each replay.

NOTE [what was left in a list]
A node keeps the function that it runs again, and a list that the function closes over may hold what
has left the region: a result of this very node. Nothing could free them. So the function that is
kept closes over a list without these, as it was before the call; and what a replay appends, it
appends to a copy of that.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Set
from typing import Any

from torch import Tensor

MUTABLE = frozenset({list, dict, set, deque, defaultdict, OrderedDict})


def without(c: Any, held: Set[int]) -> Any:
    """A container without some tensors, by their ids; ``c`` itself where there is none in it."""
    if type(c) is tuple:
        parts = _parts_without(c, held)
        return c if all(p is x for p, x in zip(parts, c)) and len(parts) == len(c) else (*parts,)
    if type(c) not in MUTABLE:
        return c
    if isinstance(c, dict):
        items = {k: _GONE if id(v) in held else without(v, held) for k, v in c.items()}
        if all(items[k] is v for k, v in c.items()):
            return c
        new = copy.copy(c)
        new.clear()
        new.update({k: v for k, v in items.items() if v is not _GONE})
        return new
    parts = _parts_without(c, held)
    if len(parts) == len(c) and all(p is x for p, x in zip(parts, c)):
        return c
    return deque(parts, c.maxlen) if isinstance(c, deque) else type(c)(parts)


_GONE = object()


def _parts_without(c: Iterable[Any], held: Set[int]) -> list[Any]:
    return [without(x, held) for x in c if id(x) not in held]


def fresh(c: Any) -> Any:
    """A copy of a container, and of those in it; what else is in it is the same."""
    if type(c) is tuple:
        return tuple(map(fresh, c))
    if type(c) not in MUTABLE or isinstance(c, set):
        return copy.copy(c) if isinstance(c, set) else c
    new = copy.copy(c)
    for key, value in c.items() if isinstance(c, dict) else enumerate(c):
        if not isinstance(value, Tensor):
            new[key] = fresh(value)
    return new
