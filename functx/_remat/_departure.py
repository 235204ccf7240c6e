"""What to say of a replay that departs from its forward: where, how, and both sequences.

Every operation of a first run is recorded with its place, which costs no more than a code object
and a number; source lines are looked up only here.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence
from typing import Any

from functx._errors import ReplayError
from functx._places import Place, describe_place, line_of
from functx._remat._entry import Entry, describe, results

_BEFORE, _AFTER = 4, 3
"""How many operations are shown around the first that differs."""


WHY = (
    "A region must do the same each time it runs, so something it reads (a flag, a counter, a "
    "global, train() or eval()) changed between forward and backward. Pass what changes as an "
    "argument, or keep it until the backward has run."
)


def departed(
    name: str,
    how: str,
    at: int,
    forward: Sequence[Entry],
    place: Place | None = None,
    replay: Sequence[Entry] | None = None,
    why: str = WHY,
) -> ReplayError:
    """The error of a replay that departs from its forward.

    Args:
        name: of the region.
        how: what is different.
        at: the number of the operation that is.
        forward: what the forward ran.
        place: the line that the replay is at, if it is at one.
        replay: what the replay ran, if that was recorded, the operation that differs included.
        why: the likely cause, and the way out.
    """
    was = None if at >= len(forward) or forward[at].place is None else forward[at].place
    places = [] if place is None else [f"at {describe_place(place)}"]
    if was is not None and (place is None or describe_place(was) != describe_place(place)):
        places.append(f"the forward was at {describe_place(was)}")
    message = (
        f"remat: the replay of the region {name!r} departed from its forward"
        f"{' (' + '; '.join(places) + ')' if places else ''}: {how}. {why}"
    )
    if replay is None:
        return ReplayError(f"{message} remat(..., debug=True) shows what both ran, side by side.")
    return ReplayError(f"{message}\n\n{side_by_side(at, forward, replay)}")


def side_by_side(at: int, forward: Sequence[Entry], replay: Sequence[Entry]) -> str:
    """What the forward and the replay ran around operation ``at``, in columns."""
    numbers = range(max(0, at - _BEFORE), min(max(len(forward), len(replay)), at + _AFTER + 1))
    rows = [
        (">" if i == at else " ", str(i), *_cells(forward, i, "(had ended)"), *_cells(replay, i))
        for i in numbers
    ]
    rows.insert(0, (" ", "", "forward", "", "", "replay", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]
    sources = [
        f"  {which} {_short(entries[at].place)}:  {_source(entries[at].place)}"
        for which, entries in (("forward", forward), ("replay ", replay))
        if at < len(entries) and entries[at].func is not results and _source(entries[at].place)
    ]
    return "\n".join([*lines, "", *sources])


def _cells(entries: Sequence[Entry], i: int, missing: str = "") -> tuple[str, str, str]:
    if i >= len(entries):
        return (missing if i == len(entries) else ""), "", ""
    entry = entries[i]
    if entry.func is results:
        return "return", "", ""
    return _name(entry), ", ".join(map(str, entry.results or ())), _short(entry.place)


def _name(entry: Entry) -> str:
    scalars = ", ".join(str(s) for s in entry.scalars if s is not None)
    if len(scalars) > 24:
        scalars = f"{scalars[:21]}..."
    return describe(entry.func) + (f"({scalars})" if scalars else "")


def _short(place: Any) -> str:
    return "" if place is None else f"{os.path.basename(place[0].co_filename)}:{line_of(place)}"


def _source(place: Any) -> str:
    return "" if place is None else linecache.getline(place[0].co_filename, line_of(place)).strip()
