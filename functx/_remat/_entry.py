"""One operation in the trace of a region, and what stands there for what is no operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functx._places import Place

MAKES = 16  # bits for what one operation makes, below its place in the record
MADE_HERE = -1
"""The source of a tensor argument that the region itself made."""

REWRAPPED = -2
"""Sources from here down: a wrapper, made by a transform inside the region, of an external."""

KNOWN = -1 << 40
"""Sources from here down: a tensor that the region was seen making, by its number."""


class Entry:
    """One operation of a trace.

    Attributes:
        func: what was called.
        sources: where its tensors came from.
        scalars: its other arguments.
        place: the line that called it.
        results: what it gave, if that is recorded.
        parts: what it ran, if it is an operator of the user's.
        told: what a replay is told, where that is no number. NOTE [answers] in `_answers`.
    """

    results: list[Any] | None = None
    parts: list[Any] | None = None
    told: Any = None

    def __init__(
        self,
        func: Any,
        sources: tuple[int, ...],
        scalars: tuple[Any, ...],
        place: Place | None = None,
    ) -> None:
        self.func = func
        self.sources = sources
        self.scalars = scalars
        self.place = place


def nested_capture() -> None:
    """Stands in a trace where a nested region captured a tensor."""


def nested_region() -> None:
    """Stands in a trace where a nested region took its inputs."""


def nested_run() -> None:
    """Stands in a trace where a nested region has run, with a fingerprint of what it ran."""


def nested_values() -> None:
    """Stands in a trace where a nested region whose values are compared has run."""


def results() -> None:
    """Stands in a trace where the body returned."""


def nested_transform() -> None:
    """Stands in a trace where a transform of functx took its arguments."""


def custom_function() -> None:
    """Stands in a trace where ``Function.apply`` took its inputs."""


def custom_state() -> None:
    """Stands in a trace where a custom Function has kept numbers for its backward."""


def fingerprint(entries: Sequence[Entry]) -> int:
    """Equal for runs of the same operations, on the same of what is there, with the same numbers.

    A region inside another one runs afresh in a replay of that, which has no record of it.
    """
    ran: list[Any] = []
    for entry in entries:
        try:
            hash(entry.func)
            ran.append(entry.func)
        except TypeError:
            ran.append(describe(entry.func))
        ran.append(entry.sources)
        if entry.scalars:
            ran.append(repr(entry.scalars))  # 1, 1.0 and True differ; a NaN is like another
    return hash(tuple(ran))


def describe(func: Any) -> str:
    """An operation's name as a person would write it."""
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__"):
        return f"Tensor.{func.__self__.__name__}"
    return f"Tensor.{name}" if hasattr(func, "__objclass__") else name
