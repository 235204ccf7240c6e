"""Attributes that an object has in no dict."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any


def slots_of(cls: type) -> tuple[str, ...]:
    """Names of all slots, those that classes below have declared too, as `getattr` takes them."""
    if not hasattr(cls, "__slots__"):  # as of nearly all
        return ()
    found: dict[str, None] = {}
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"  # as Python does
            found[name] = None
    for name in ("__dict__", "__weakref__"):
        found.pop(name, None)
    return tuple(found)


def own_attributes(one: Any) -> dict[str, Any]:
    """What an object has of its own, in its dict and in slots; no property runs."""
    own = getattr(one, "__dict__", None)
    found = dict(own) if isinstance(own, dict) else {}
    for name in slots_of(type(one)):
        with suppress(AttributeError):
            found[name] = object.__getattribute__(one, name)
    return found


def slot_of(cls: type, name: str) -> types.MemberDescriptorType | None:
    """A slot itself, which a property of a class above may hide."""
    for base in cls.__mro__:
        if type(slot := base.__dict__.get(name)) is types.MemberDescriptorType:
            return slot
    return None


def in_slots(one: Any, slots: Iterable[types.MemberDescriptorType]) -> Iterator[Any]:
    """What an object holds in some slots; a property behind the name of one does not run."""
    for slot in slots:
        try:
            yield slot.__get__(one)
        except AttributeError:  # nothing was put there
            continue
