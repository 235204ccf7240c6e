"""Recording what operations gave, in the forward and in replays: for ``debug`` and ``"values"``.

NOTE [values]
With ``determinism_check="values"`` every tensor that an operation of the region makes or writes to
has a checksum, in the forward and in every replay, under every transform (it is that of the plain
tensor inside all wrappers). Nothing is left out of a replay then, and every input is kept. Memory
that an operation hands out as it finds it (``torch.empty``) is filled first: what is in it differs
from run to run, and nobody may rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from functx._places import where
from functx._remat._aliases import PassedOn
from functx._remat._checksum import checksum, unobserved
from functx._remat._entry import Entry, describe, results
from functx._remat._holders import base_of
from functx._remat._options import Options
from functx._remat._replay import Replay
from functx._remat._tapes import tensors_of
from functx._remat._tracker import Tracker
from functx._remat._watch import all_must_run
from functx._remat._writes import written_by

_UNWRITTEN = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "empty_quantized"),
        *("new_empty", "new_empty_strided", "resize_", "resize_as_"),
    }
)


class Result:
    """What one operation gave: shape and dtype as its level sees them, and a checksum."""

    __slots__ = ("bits", "dtype", "shape")

    def __init__(self, t: Tensor, *, values: bool) -> None:
        # A ragged size has another symbol in each run.
        self.shape = tuple(n if type(n) is int else "*" for n in t.shape)
        self.dtype = t.dtype
        self.bits = checksum(t) if values else None

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Recording(Tracker):
    """Mixed into a tracker: calls `record` with everything that operations make or write to."""

    # No slots: those of a second base class would not fit beside the first's.
    values: bool
    targets: list[Tensor]
    unwritten: bool

    def record(self, result: Result) -> None:
        """What the operation that was recorded last made, or wrote to."""
        raise NotImplementedError

    def start(self, options: Options) -> None:
        """Nothing has run."""
        self.values = options.values
        self.targets = []
        self.unwritten = False
        if self.values:
            all_must_run()

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what the operation may write to."""
        super().before(func, args, kwargs)
        self.targets = tensors_of(written_by(func, args, kwargs))

    def made(self, t: Tensor) -> None:
        """Record it."""
        super().made(t)
        if self.unwritten and self.values:
            _fill(t)
        self.targets = [target for target in self.targets if target is not t]
        self.record(Result(t, values=self.values))

    def operands(self, func: Any, values: Sequence[Any]) -> Any:
        """What modes do not see writes to nothing that is not seen elsewhere."""
        self.targets, self.unwritten = [], False
        return super().operands(func, values)

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One operation."""
        self.targets, self.unwritten = [], _leaves_unwritten(func, args)
        out = super().run(func, args, kwargs)
        written, self.targets = self.targets, []
        for target in written:
            self.record(Result(target, values=self.values))
        return out


def _leaves_unwritten(func: Any, args: Any) -> bool:
    """Whether an operation hands out memory as it finds it."""
    name = getattr(func, "__name__", "")
    if name == "new":  # of a shape; of a list, it has what is in that
        return all(isinstance(a, (int, torch.Size)) for a in args[1:])
    return name in _UNWRITTEN


class RecordingReplay(Recording, Replay):
    """A replay that compares what operations give with the forward, and knows what it ran."""

    __slots__ = ("_debug", "_ran", "_running")

    _plain = False

    def __init__(
        self,
        entries: Sequence[Entry],
        externals: Sequence[Tensor],
        options: Options,
        left: Sequence[int] = (),
        passed_on: Sequence[PassedOn] = (),
    ) -> None:
        super().__init__(entries, externals, options.name, left, passed_on)
        self.start(options)
        self._debug = options.debug
        self._ran: list[Entry] = []
        self._running: Any = None

    def operands(self, func: Any, values: Sequence[Any]) -> Any:
        """Remember what is under way."""
        self._running = func
        return super().operands(func, values)

    def returned(self, outs: Sequence[Any]) -> Any:
        """Remember what is under way."""
        self._running = results
        return super().returned(outs)

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Remember what is under way."""
        self._running = func
        return super().run(func, args, kwargs)

    def close(self, func: Any) -> None:
        """Compare the operation with the record, and note that it ran."""
        entry = self._entry(func)
        super().close(func)
        self._ran.append(entry)

    def _entry(self, func: Any) -> Entry:
        entry = Entry(func, (), tuple(self._scalars), where())
        entry.results = []
        return entry

    def ran(self) -> Sequence[Entry] | None:
        """What ran, with the operation that is not on the record yet."""
        if not self._debug:
            return None
        under_way = [] if self._running is None else [self._entry(self._running)]
        return [*self._ran, *under_way] if len(self._ran) == self._at else self._ran

    def record(self, result: Result) -> None:
        """Compare with what the forward gave."""
        if not self._ran:
            return
        at = self._at - 1
        given = self._ran[-1].results
        recorded = self._entries[at].results
        assert given is not None
        given.append(result)
        if recorded is None or len(recorded) < len(given):
            return
        was = recorded[len(given) - 1]
        operation = f"operation {at} ({describe(self._entries[at].func)})"
        if (was.shape, was.dtype) != (result.shape, result.dtype):
            self._at = at
            self._depart(f"{operation} gave {was} and gives {result}")
        if was.bits != result.bits:
            self._at = at
            self._depart(
                f"{operation} gives other values than it gave, in its result {result}",
                why="Memory that it reads changed in a way torch does not see (through .data, "
                "numpy, or another process), numbers were drawn that are not restored, or the "
                "operation itself is not deterministic (torch.use_deterministic_algorithms).",
            )


def _fill(t: Tensor) -> None:
    """Give memory that nobody wrote to the same contents in every run. ``NOTE [values]``."""
    with ExitStack() as stack:
        unobserved(stack)
        base = base_of(t)
        if base.layout is torch.strided and base.device.type != "meta":
            base.detach().zero_()
