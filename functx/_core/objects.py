"""Read objects of users and of other libraries without running their code.

A class may override any method that a walk over objects would call: ``__len__`` of a tuple may
raise, ``values`` of a dict may load a file for each value, and reading any attribute of a lazy
module loads the module. The functions here read a container with the methods of the built-in class
that it derives from. They use ``type(x)``, since ``isinstance`` also reads ``x.__class__``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

_BASES: Any = (list, tuple, set, frozenset)


def is_of(x: Any, kinds: Any) -> bool:
    """Whether the class of ``x`` derives from one of ``kinds``, without reading ``x.__class__``."""
    return issubclass(type(x), kinds)


def contents(x: Any) -> tuple[Any, ...] | None:
    """The items of a container, or ``None`` if ``x`` is not a list, tuple, dict, set or frozenset.

    For a dict these are its keys, followed by its values. An instance of a derived class is read as
    an instance of the built-in class.
    """
    kind = type(x)
    if kind is list or kind is tuple:
        return (*x,)
    if issubclass(kind, dict):
        # An OrderedDict keeps its order outside the dict that it derives from.
        base = OrderedDict if issubclass(kind, OrderedDict) else dict
        return (*base.keys(x), *base.values(x))
    if issubclass(kind, (list, tuple, set, frozenset)):
        return (*next(b for b in _BASES if issubclass(kind, b)).__iter__(x),)
    return None


def attributes(x: Any) -> dict[Any, Any] | None:
    """The ``__dict__`` of ``x``, or ``None`` if ``x`` has no such dict.

    The class may define ``__dict__`` as a property; an error that this raises counts as no dict.
    """
    try:
        found = object.__getattribute__(x, "__dict__")
    except Exception:
        return None
    if type(found) is dict:
        return found
    return dict(dict.items(found)) if issubclass(type(found), dict) else None
