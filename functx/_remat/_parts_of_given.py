"""What a region is given, taken apart: containers and objects, their parts and their state."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from functx import _tree
from functx._errors import RematError
from functx._remat._slots import slots_of
from functx._remat._tapes import PLAIN

_SEQUENCES = frozenset({list, deque})
_DICTS = frozenset({dict, defaultdict, OrderedDict})
OF_PYTHON = _SEQUENCES | _DICTS
BUILT_IN = (list, dict, deque, set)  # which classes may be derived from
_LEAVES = frozenset(
    {*PLAIN, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device}
)

_OTHERS = (Tensor, ModuleType, torch.Generator)

Path = tuple[Any, ...]
"""Where something is in a tree: indices, keys and, of objects, names of attributes."""


def is_container(x: Any) -> bool:
    """Whether ``x`` is taken apart with the arguments that it is among."""
    cls = type(x)
    return cls not in _LEAVES and (cls in OF_PYTHON or cls is tuple or _tree.is_node(x))


def is_object(x: Any) -> bool:
    """Whether ``x`` has nothing but attributes that a body may change."""
    cls = type(x)
    return hasattr(x, "__dict__") and not (cls in _LEAVES or callable(x) or isinstance(x, _OTHERS))


def is_same(a: Any, b: Any) -> bool:
    """Whether two are one."""
    return a is b


def parts_of(c: Any) -> Iterator[tuple[Any, Any]]:
    """What a container holds, each with where."""
    if type(c) in _SEQUENCES or isinstance(c, tuple):
        return enumerate(c)
    if type(c) in _DICTS:
        return iter(c.items())
    return iter(_attributes(c).items())


def _attributes(one: Any) -> dict[str, Any]:
    """Of an object: those it has of its own."""
    found = dict(getattr(one, "__dict__", {}))
    for name in slots_of(type(one)):
        if hasattr(one, name):
            found[name] = getattr(one, name)
    return found


def state_of(c: Any) -> tuple[Any, list[Any]]:
    """What a container holds, to be compared."""
    if type(c) in _SEQUENCES:
        return None, [*c]
    if type(c) in _DICTS:
        return [*c], [*c.values()]
    held = _attributes(c)
    if isinstance(c, BUILT_IN):  # of another class
        return [*held, *_tree.paths(c)], [*held.values(), *_tree.leaves(c)]
    return [*held], [*held.values()]


def same_state(a: tuple[Any, list[Any]], b: tuple[Any, list[Any]]) -> bool:
    """Whether what two containers hold is the same."""
    return len(a[1]) == len(b[1]) and all(map(is_same, a[1], b[1])) and a[0] == b[0]


def set_part(c: Any, key: Any, x: Any) -> None:
    """Let ``x`` be there."""
    if type(c) in OF_PYTHON:
        c[key] = x
    else:
        object.__setattr__(c, key, x)


def remade(t: Any, parts: list[Any]) -> Any:
    """A tuple, named or not, of other parts."""
    if type(t) is tuple:
        return tuple(parts)
    return t._make(parts) if hasattr(t, "_make") else type(t)(parts)


def become(theirs: Any, mine: Any) -> None:
    """Let a container of the caller's hold what that of the run holds."""
    if type(theirs) is list:
        theirs[:] = mine
    elif type(theirs) is deque or type(theirs) in _DICTS:
        if type(theirs) is not deque and [*theirs] == [*mine]:
            theirs.update(mine)
            return
        theirs.clear()
        (theirs.extend if type(theirs) is deque else theirs.update)(mine)
    elif isinstance(theirs, BUILT_IN):
        raise RematError(
            f"remat: a region changes an argument of class {type(theirs).__qualname__!r}, which "
            "functx does not know how to change for the caller. Return it from the region."
        )
    else:
        before, now = _attributes(theirs), _attributes(mine)
        for name in before.keys() - now.keys():
            object.__delattr__(theirs, name)
        for name, x in now.items():
            if name not in before or before[name] is not x:
                object.__setattr__(theirs, name, x)


def at(tree: Any, path: Path) -> Any:
    """What is there; ``None`` if an object has no such attribute."""
    for key in path:
        if type(tree) in OF_PYTHON or isinstance(tree, tuple):
            tree = tree[key]
        else:
            tree = getattr(tree, key, None)
    return tree


def with_part(tree: Any, path: Path, x: Any) -> Any:
    """A tree with something else somewhere: in place, but for tuples."""
    if not path:
        return x
    part = at(tree, path[:1])
    new = with_part(part, path[1:], x)
    if new is part:
        return tree
    if isinstance(tree, tuple):
        return remade(tree, [*tree[: path[0]], new, *tree[path[0] + 1 :]])
    set_part(tree, path[0], new)
    return tree
