"""Finds the reason why a function is traced again and again.

Several graphs of a function are normal: training and evaluation, with and without gradients, a
smaller last batch. A third value in the same place is most often a mistake (a step counter, a
learning rate), or a size. So a warning names the place that has had three values in the last three
traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from functx._compile.effects import holder_of
from functx._compile.entries import Known
from functx._compile.search import PLAIN, Search
from functx._core import describe, is_of, name_of

_SIZES = "the sizes of the arguments change"
_DYNAMIC = "Use dynamic=True for one graph that serves all sizes, or pad to a few sizes"
_ARGUMENT = "an argument that is not a tensor changes"
_GIVE_A_TENSOR = "Use a tensor in its place"
_KEEP = "Use a tensor in its place, or move it (a counter, for example) out of the function"


def change(made: Sequence[tuple[Any, Known]], found: Search) -> str | None:
    """Words for the place with three values in the last three traces, and a remedy; or ``None``.

    Args:
        made: The key and the program of each trace.
        found: The state in the last trace.
    """
    if len(made) < 3:
        return None
    last = [[*_parts(key, known)] for key, known in made[-3:]]
    if len({*map(len, last)}) > 1:
        return None
    for parts in zip(*last):
        what, remedy, _ = parts[-1]
        values = [value for _, _, value in parts]
        if any(_are_same(a, b) for a, b in zip(values, (*values[1:], values[0]))):
            continue
        what = what or f"{_place(values[-1], found)} changes"
        shown = ", then ".join(map(_shown, values))
        return f"{what} ({shown}). {remedy}"
    return None


def _parts(key: Any, known: Known) -> Iterator[tuple[str, str, Any]]:
    """The parts of the key of a trace: words for the part, a remedy, and the value."""
    _, others, kinds, *_ = key
    yield _SIZES, _DYNAMIC, tuple(_shape(kind) for kind in kinds)
    for value in others:
        yield _ARGUMENT, _GIVE_A_TENSOR, value
    for value in known.key[0]:
        yield "", _KEEP, value


def _shape(kind: Any) -> Any:
    """The shape in the description of a tensor that `described` has made."""
    return next((tuple(x) for x in kind if is_of(x, tuple)), ())


def _are_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # ``__eq__`` of a user class may raise any error
        return False


def _shown(value: Any) -> str:
    # Values of arguments are pairs of class and value, in which floats are strings.
    if is_of(value, tuple) and len(value) == 2 and is_of(value[0], type):
        value = value[1]
    return describe(value) if not is_of(value, tuple) else " ".join(map(str, value))


def _as_in_keys(x: Any) -> Any:
    """A plain value in the form in which it is in the key of a search."""
    return repr(x) if type(x) in (float, complex) else x


def _place(value: Any, found: Search) -> str:
    """The name of the attribute or variable that holds a value, if exactly one does."""
    places = {
        (id(box), key): (box, key)
        for box, key, x in found.items
        if type(x) in PLAIN and _as_in_keys(x) == value and is_of(key, str)
    }
    if len(places) != 1:
        return "what it reads"
    box, key = next(iter(places.values()))
    holder = holder_of(box, found)
    owner = next((x for x in found.held if getattr(x, "__dict__", None) is box), holder)
    return key if is_of(owner, dict) else f"{key} of {name_of(owner)}"
