"""Lists, dicts and sets that a body writes tensors into: without these, and fresh for each replay.

NOTE [what was left in a list]
A node keeps the function that it runs again, and a list that the function closes over may hold what
has left the region: a result of this very node. Nothing could free them. So the function that is
kept closes over a list without these, as it was before the call; and what a replay appends, it
appends to a copy of that.

Containers hold each other, and themselves (as a child holds its parent). All that lead to what is
left out, or is copied, are copied as well, each of them once: what is reached in two ways stays so.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

MUTABLE = frozenset({list, dict, set, deque, defaultdict, OrderedDict})

Copies = dict[int, tuple[Any, Any]]
"""By the id of what was there, that and what is there now."""


def reached(roots: Iterable[Any]) -> dict[int, Any]:
    """Some containers and those in them, by id; tuples too."""
    found: dict[int, Any] = {}
    stack = [*roots]
    while stack:
        c = stack.pop()
        if id(c) not in found:
            found[id(c)] = c
            stack += [x for x in elements(c) if type(x) in MUTABLE or type(x) is tuple]
    return found


def elements(c: Any) -> Iterable[Any]:
    """What a container holds: the values of a dict."""
    return c.values() if isinstance(c, dict) else c


def copied(
    c: Any,
    marked: Collection[int],
    held: Collection[int],
    copies: Copies,
    before: Mapping[int, Any] = MappingProxyType({}),
) -> Any:
    """A container without some tensors; ``c`` itself where it leads to nothing that changes.

    Args:
        c: a list, dict, set or the like.
        marked: ids of containers that are copied in any case.
        held: ids of the tensors.
        copies: what was copied before; it is added to.
        before: by the id of a container, what it held before, if that is something else.
    """
    found = reached([c])
    within: dict[int, list[int]] = {}  # by its id, the containers that something is in
    for key, one in found.items():
        for part in elements(one):
            if id(part) in found or id(part) in held:
                within.setdefault(id(part), []).append(key)
    change: set[int] = set()
    stack = [
        key
        for key in (*found, *within)
        if any(key in some for some in (marked, held, copies, before))
    ]
    while stack:
        key = stack.pop()
        if key not in change:
            change.add(key)
            stack += within.get(key, ())
    new = [found[key] for key in change if key in found and key not in copies]
    for one in new:
        if type(one) is not tuple:
            empty = copy.copy(one)
            empty.clear()
            copies[id(one)] = one, empty

    for one in new:
        contents = before.get(id(one), one)
        if isinstance(one, dict):
            copies[id(one)][1].update(
                {k: _now(v, change, held, copies) for k, v in contents.items() if id(v) not in held}
            )
        elif type(one) is not tuple:
            fill = copies[id(one)][1].update if type(one) is set else copies[id(one)][1].extend
            fill([_now(x, change, held, copies) for x in contents if id(x) not in held])
    return _now(c, change, held, copies)


# No function in the one above: it would be a cycle with its cell, and hold what is left out.
def _now(x: Any, change: Collection[int], held: Collection[int], copies: Copies) -> Any:
    """What is there now, where ``x`` was."""
    if id(x) not in copies:
        if type(x) is not tuple or id(x) not in change:
            return x
        parts = [_now(part, change, held, copies) for part in x if id(part) not in held]
        copies[id(x)] = x, tuple(parts)
    return copies[id(x)][1]
