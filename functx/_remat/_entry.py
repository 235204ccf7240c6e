"""One operation in the trace of a region, and what stands there for what is no operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from functx._places import Place
from functx._remat._arguments import same
from functx._remat._hung_on_given import HANGING

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
    parts: Calls | None = None
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


def is_marker(func: Any) -> bool:
    """Whether that is no operation: it stands in a trace for something else."""
    return getattr(func, "__module__", None) == __name__


def may_go(entries: Sequence[Entry]) -> list[bool]:
    """For each operation, whether it has read nothing but what such ones gave: a mask, a table."""
    found: list[bool] = []
    for entry in entries:
        sources = entry.sources[: how_many_are_read(entry.func)]
        made_by = [((KNOWN - source) >> MAKES) - 1 for source in sources if source <= KNOWN]
        known = [i for i in made_by if 0 <= i < len(found)]  # else it was made unseen
        all_known = len(known) == len(sources) and not is_marker(entry.func)
        found.append(all_known and all(found[i] for i in known))
    return found


def how_many_are_read(func: Any) -> int | None:
    """Of how many tensors, the first that it is given, an operation reads values; ``None``: all."""
    name = getattr(func, "__name__", None)
    return 0 if name in _BY_SHAPE else 1 if name in _BY_DTYPE else None


_BY_SHAPE = frozenset(
    {
        *("zeros_like", "ones_like", "empty_like", "full_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full"),
    }
)
"""What reads no value of the tensor that it is given."""

_BY_DTYPE = frozenset({"to", "type_as"})
"""What reads none of the second one."""

NO_CALLS = (results, *HANGING, Tensor.is_inference, Tensor.is_conj, Tensor.is_neg)
"""What `Calls` leaves out: hooks, which are counted elsewhere, and what nodes ask themselves."""


class Calls:
    """What the user's code calls in a pullback, in order. ``NOTE [replayed pullbacks]``.

    Equal to those of a replay if that calls the same, with the same numbers, but for `may_go`.

    Attributes:
        entries: of what is called.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, entries: Sequence[Entry]) -> None:
        those = [*zip(entries, may_go(entries))]
        those = [(e, goes) for e, goes in those if e.func not in NO_CALLS]
        self.entries = [e for e, _ in those]
        self._may_go = [goes for _, goes in those]

    def add(self, func: Any, scalars: Sequence[Any], may_go: bool) -> None:
        """One more call; whether a replay may do without."""
        self.entries.append(Entry(func, (), tuple(scalars)))
        self._may_go.append(may_go)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Calls):
            return NotImplemented
        at = 0
        for e in other.entries:
            after = self.after(at, e.func, e.scalars)
            if after is None:
                return False
            if (self.entries[after - 1].parts or _CALLS_NOTHING) != (e.parts or _CALLS_NOTHING):
                return False
            at = after
        return self.next(at) is None

    def __repr__(self) -> str:
        return f"[{', '.join(called(e.func, e.scalars) for e in self.entries)}]"

    def after(self, at: int, func: Any, scalars: Sequence[Any]) -> int | None:
        """Where a replay is that was at ``at`` and makes a call; ``None`` if it may not."""
        for i in range(at, len(self.entries)):
            e = self.entries[i]
            if e.func == func and same(e.scalars, scalars):
                return i + 1
            if not self._may_go[i]:
                break
        return None

    def next(self, at: int) -> Entry | None:
        """What a replay that is at ``at`` must call."""
        rest = zip(self.entries[at:], self._may_go[at:])
        return next((e for e, goes in rest if not goes), None)


_CALLS_NOTHING = Calls(())


def fingerprint(entries: Sequence[Entry]) -> int:
    """Equal for runs of the same operations, on the same of what is there, with the same numbers.

    A region inside another one runs afresh in a replay of that, which has no record of it. What a
    replay may do without, in part, is left out: `calls_inside`.
    """
    ran: list[Any] = []
    for entry in entries:
        try:
            hash(entry.func)
            ran.append(entry.func)
        except TypeError:
            ran.append(describe(entry.func))
        ran.append(entry.sources)
        if scalars := [x for x in entry.scalars if not isinstance(x, Calls)]:
            ran.append(repr(scalars))  # 1, 1.0 and True differ; a NaN is like another
    return hash(tuple(ran))


def calls_inside(entries: Sequence[Entry]) -> Iterator[Calls]:
    """What hooks, backwards and operators call that operations run."""
    for entry in entries:
        yield from (x for x in entry.scalars if isinstance(x, Calls))
        if entry.parts is not None and entry.parts.entries:
            yield entry.parts


def describe(func: Any) -> str:
    """An operation's name as a person would write it."""
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__"):
        return f"Tensor.{func.__self__.__name__}"
    return f"Tensor.{name}" if hasattr(func, "__objclass__") else name


def called(func: Any, scalars: Sequence[Any]) -> str:
    """A call as a person would write it, without its tensors."""
    if func is nested_run:
        inside = f", which calls {scalars[0]}," if isinstance(scalars[0], Calls) else ""
        return f"a region inside{inside}"
    return f"{describe(func)}({', '.join(map(str, scalars))})" if scalars else describe(func)
