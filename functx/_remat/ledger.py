"""What a region runs, seen below autograd and all transforms: recorded first, then run again.

NOTE [leaving out]
When a region has run, the memory that is still alive, results aside, is what its tape reads.
Going back through the record from there tells which operations a replay must run. For the others a
replay hands out memory that nobody has written. That nobody reads it is not taken on trust: an
operation that is about to read such memory, or a tape that holds it in the end, makes the replay
begin again and run everything. So a wrong record costs time, and never a wrong number.

Operations are matched within the call of the user's that ran them: how many run there may depend on
which tapes live. From the first one that does not match to the end of its call, everything runs.
If nothing is kept, only the operators are compared, which is quick. So one operation may be taken
for another of the same operator. If something is left out by mistake, the replay notices when it is
read, and begins again. The memory handed out may also have a wrong shape, which may lead to any
error. So after an error, too, the replay begins again, and runs everything.

What a kernel of an extension reads, no mode sees. So nothing is left out where a custom Function is
on the tape, nor before what last reads memory, made empty or zero, that nothing seen has filled.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functx import _torch
from functx._core import uncompiled
from functx._remat import departures, levels
from functx._remat.generators import Draws, generator_of
from functx._remat.operators import (
    ALWAYS,
    DRAWN,
    NEW,
    SILENT,
    VIEW,
    WRITE,
    Operator,
    operator_of,
    real_zeros,
    tensors_in,
    written_by,
)
from functx._remat.region import NEVER, Region
from functx._torch import graphs, storage_of

Layout = Any  # (size, stride, dtype, device) of a tensor, or a list of layouts


class Entry(NamedTuple):
    """One operation that has run."""

    overload: Any  # ``None`` for a read outside of torch
    kind: str
    reads: Sequence[int] = ()  # memory
    writes: Sequence[int] = ()
    layout: Layout = None  # of the results
    makers: Sequence[int] = ()  # by which entries the operands were made, -1 for none


class Ran(NamedTuple):
    """What a forward has run."""

    entries: list[Entry]
    starts: list[int]  # where among them each call begins
    live: Any = None  # which of them a replay runs; ``None`` for all
    left_out: int = NEVER  # the first call in which it leaves out, or hands out kept values
    in_graph: bool = False  # whether a graph was traced, in which what is drawn is kept
    bounds: Sequence[int] = ()  # the starts, and where the last call ends


class Ledger(_torch.TorchDispatchMode):
    """A dispatch mode that knows which of the user's calls runs."""

    supports_higher_order_operators = True
    _should_skip_dynamo = _torch.never_skip_dynamo
    saver: Any = None  # keeps values that a policy wants
    names: frozenset[str] = frozenset()  # that `checkpoint_name` gave, here and in regions inside

    def __init__(self) -> None:
        self.busy = False  # an operation is in here: what it calls is the engine's, not the user's
        # What was made inside: number of the entry, the storage (weakly: addresses come again).
        self.made: dict[int, tuple[int, Any]] = {}
        self.since = graphs.last_node()

    def maker_of(self, storage: int) -> int:
        """The entry that made this memory; -1 if none did."""
        number, reference = self.made.get(storage, (-1, None))
        return number if reference is None or reference() is not None else -1

    def note_made(self, t: Tensor, number: int) -> None:
        """The memory of ``t`` was made by an entry."""
        storage = _torch.memory_of(t)
        self.made[storage._cdata] = number, weakref.ref(storage)

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = operator_of(func)
        if operator.takes_number:
            args = real_zeros(args)
        self.busy = True
        try:
            if operator.kind is SILENT:
                return operator.call(*args, **kwargs) if kwargs else operator.call(*args)
            return self.run(operator, args, kwargs)
        finally:
            self.busy = False

    def run(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Run one operation."""
        raise NotImplementedError

    def next_call(self) -> None:
        """A call of the user's begins."""

    def need(self, t: Tensor) -> None:
        """The memory of ``t`` is about to be read, perhaps outside of torch: ``numpy()``, say."""

    def keeping(self) -> Any:
        """What has the memory of kept values in it; ``None`` if nothing is kept."""
        return self.saver


def ledgers() -> list[Ledger]:
    """Those that listen, of regions around and their replays too; outermost first."""
    modes = map(_torch.dispatch_mode_at, range(_torch.dispatch_depth()))
    return [mode for mode in modes if isinstance(mode, Ledger)]


def is_left_out() -> bool:
    """Whether a replay that is under way has left out anything so far."""
    return any(isinstance(mode, Rerun) and mode.hollow for mode in ledgers())


def read_outside(tensors: Sequence[Tensor]) -> None:
    """Code that no mode sees is about to read these."""
    for ledger in ledgers():
        for t in tensors:
            ledger.need(levels.base_of(t))


class Record(Ledger):
    """The ledger of a forward."""

    def __init__(self, draws: Draws | None, in_graph: bool = False) -> None:
        super().__init__()
        self.draws, self.in_graph = draws, in_graph
        self.entries: list[Entry] = []
        self.starts = [0]  # where in `entries` each call begins
        self.written: list[int] = []  # memory of inputs that this call has written
        self.writes: Any = None  # told before memory is written that is not the region's
        self.draws_now = self.writes_now = (
            False  # this call draws, or writes to what it has not made
        )
        self.followed = 0  # how many entries are those of a script that the run began with
        self.blind = False  # code has run that no mode sees
        self.blank: set[int] = set()  # entries whose memory, empty or zero, nothing seen has filled

    def next_call(self) -> None:
        self.starts.append(len(self.entries))

    def go_on_from(self, ran: Ran, calls: int) -> None:
        """Go on after so many calls of a run that has told what it ran.

        Of the memory that these have made nothing is known, so a replay runs all of them.
        """
        ends = ran.starts[calls + 1 :] or [len(ran.entries)]
        self.starts, self.entries = ran.starts[: calls + 1], ran.entries[: ends[0]]
        self.followed = len(self.entries)
        blank = any(operator_of(e.overload).is_blank for e in self.entries if e.overload)
        self.blind = blank or ran.live is None

    def has_made(self, storage: int) -> bool:
        """Whether memory was made by the region."""
        return self.maker_of(storage) >= 0

    def run(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in(args, kwargs)
        touched = [storage_of(t) for t in tensors]
        kind = operator.kind
        if operator.draws and operator.draws_nothing(args):
            kind = NEW
        elif operator.draws and self.in_graph:
            kind = DRAWN
        elif operator.draws and self.draws is not None:
            self.draws_now = True
            self.draws.note(generator_of(tensors, args, kwargs))
        written = written_by(operator, args, kwargs) if operator.writes else []
        for storage in written:
            self.blank.discard(self.maker_of(storage))
            self.writes_now = self.writes_now or self.maker_of(storage) < self.starts[-1]
            if not self.has_made(storage):
                self.writes.about_to_write(storage)
                self.written.append(storage)
                kind = kind if kind is DRAWN else ALWAYS
        if written and self.saver is not None:
            self.saver.about_to_write(written)
        before = self.draws.states() if operator.is_foreign and self.draws is not None else None
        out = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        if kind is VIEW:
            self.entries.append(Entry(operator.overload, VIEW))
            return out
        if before is not None and before != self.draws.states():  # type: ignore[union-attr]
            kind, self.draws_now = ALWAYS, True  # a replay must run it
            self.draws.note_unseen()  # type: ignore[union-attr]
        self._note(operator, kind, touched, written, out)
        if self.saver is not None:
            self.saver.judge(len(self.entries) - 1, self.entries[-1], args, kwargs or {}, out)
        return out

    def _note(
        self, operator: Operator, kind: str, touched: list[int], writes: list[int], out: Any
    ) -> None:
        """Write down an operation that has run, and the memory that it has made."""
        reads, makers = touched if operator.reads else [], [*map(self.maker_of, touched)]
        for t in [out] if type(out) is Tensor else tensors_in((out,), None):
            if (key := storage_of(t)) not in touched:
                if key != -1:
                    self.note_made(t, len(self.entries))
                writes.append(key)
        layout = None
        if kind is NEW and not _is_plain(out):
            kind = ALWAYS
        elif kind is NEW and not writes:  # views, after all
            kind = VIEW
        elif kind in (NEW, DRAWN):
            layout = layout_of(out)
            if operator.is_blank and out.numel():
                self.blank.add(len(self.entries))
        self.entries.append(Entry(operator.overload, kind, reads, writes, layout, makers))

    def need(self, t: Tensor) -> None:
        self.blank.discard(self.maker_of(storage_of(t)))
        self.entries.append(Entry(None, ALWAYS, [storage_of(t)]))

    def live(self, needed: set[int], kept: Any) -> bytearray:
        """Which operations a replay must run, for the memory in ``needed`` to be there."""
        live = bytearray(len(self.entries))
        for i in range(len(self.entries) - 1, -1, -1):
            entry = self.entries[i]
            if entry.kind is VIEW:
                live[i] = 1
                continue
            live[i] = entry.kind in (ALWAYS, DRAWN) or not needed.isdisjoint(entry.writes)
            # (What was drawn in a graph stays whole: a replay that begins again can't draw it.)
            if live[i] and i in kept and entry.kind is not DRAWN:
                kept[i].read = needed.intersection(entry.writes)
            if entry.kind is NEW:
                needed.difference_update(entry.writes)
            if live[i] and i not in kept:
                needed.update(entry.reads)
        return live


def needed(record: Record, results: list[Tensor], kept: list[Tensor]) -> set[int]:
    """The memory made by the region that its tape reads: what is alive, but for results and kept.

    Who holds a tensor is counted exactly: its Python object, the wrappers around it, the views of
    it; and who holds a storage, tensors and its own Python object. What somebody else holds too, is
    on the tape. Results are given as the body's, and as what they are made of at the lowest level.
    """
    alive, noted = set(filter(record.has_made, record.made)), graphs.noted_after(record.since)
    if noted:
        alive = {m for m in alive if _torch.storage_use_count(m) > 1 + noted[m]}
    family = [*{id(t): t for t in (*results, *kept)}.values()]
    holders = dict.fromkeys(map(id, family), 0)  # by id: how many of the family hold it
    for t in family:  # which grows
        held = [t._base] if t._is_view() and t._base is not None else []
        if _torch.level_of(t) > 0:
            held.append(_torch.inner_of(t))
        for inside in held:
            if id(inside) not in holders:
                family.append(inside)
            holders[id(inside)] = holders.get(id(inside), 0) + 1
    users: dict[int, int] = {}
    on_tape = {-1}
    for t in family:
        storage = storage_of(levels.base_of(t))
        if _torch.level_of(t) <= 0:
            # (One is the storage's Python object.)
            users[storage] = users.get(storage, 1 + noted[storage]) + 1
        if t._use_count() > 1 + holders[id(t)]:  # type: ignore[attr-defined]
            on_tape.add(storage)
    for storage, n in users.items():
        if storage not in on_tape and _torch.storage_use_count(storage) <= n:
            alive.discard(storage)
    return alive


def leave_out(region: Region, record: Record, results: list[Tensor]) -> Ran:
    """Find what a replay leaves out: what nothing needs that is alive, and what a policy kept."""
    saver, left_out = record.saver, NEVER
    read = needed(record, results, [] if saver is None else saver.held())
    live: Any = record.live(read, {} if saver is None else saver.kept)
    live[: record.followed] = b"\1" * record.followed
    if saver is not None:
        left_out = 0
        region.kept = saver.settled(live)
    blank = {m for i in record.blank if live[i] for m in record.entries[i].writes}
    if blank and saver is None:
        last = max([0, *(i for i, e in enumerate(record.entries) if not blank.isdisjoint(e.reads))])
        live[:last] = b"\1" * last
    if not region.options.early_stop or record.blind or (blank and saver is not None):
        live = None  # (what code reads that no mode sees is not known)
    elif saver is None and (at := live.find(0)) >= 0:
        left_out = bisect_right(record.starts, at) - 1
    in_graph = any(e.kind is DRAWN for e in record.entries)
    bounds = (*record.starts, len(record.entries))
    return Ran(record.entries, record.starts, live, left_out, in_graph, bounds)


def _is_plain(out: Any) -> bool:
    """Whether memory can stand in for the results: dense tensors of no subclass."""
    if isinstance(out, (list, tuple)):
        return all(map(_is_plain, out))
    return out is None or type(out) is int or (_torch.is_dense(out) and storage_of(out) != -1)


def layout_of(out: Any) -> Layout:
    """The layout of results, nested as they are."""
    if isinstance(out, Tensor):
        return out.size(), out.stride(), out.dtype, out.device
    return out if out is None or type(out) is int else [layout_of(o) for o in out]


def filled(layout: Layout, one: Callable[[Any], Any]) -> Any:
    """Results of a layout, each tensor as ``one`` makes it of its own."""
    if type(layout) is list:
        return [filled(part, one) for part in layout]
    return one(layout) if type(layout) is tuple else layout


def unwritten(layout: Layout) -> Any:
    """Memory of a layout, which nobody is to read (see NOTE [leaving out])."""
    return filled(layout, lambda x: torch.empty_strided(*x[:2], dtype=x[2], device=x[3]))


class BeginAgain(BaseException):
    """A replay was about to read memory that it has not computed (see NOTE [leaving out])."""


class Rerun(Ledger):
    """The ledger of a replay: runs what is live, and hands out kept values and unwritten memory."""

    draws_again = False  # whether the replay has put generators back

    def __init__(self, ran: Ran, live: Any, kept: Any, calls: int) -> None:
        """It begins to listen when so many calls have been made."""
        # (What `Ledger` has, too: this runs at each replay.)
        self.busy, self.made = False, {}
        self.since = graphs.last_node() if _torch.dispatch_depth() else None
        self.entries, self.kept = ran.entries, kept
        self.bounds = ran.bounds  # where among the entries each call begins, and the last one ends
        self.live = live  # which entries to run; ``None`` runs all
        self.in_graph = ran.in_graph
        self.in_line = True  # whether all operations so far are entries
        self.hollow: dict[int, Any] = {}  # memory that was not computed: the storage, weakly
        self.given: set[int] = set()  # memory of kept values that were handed out
        self.call = calls - 1
        self.next_call()
        self.first = self.end if calls else 0  # the first entry that is seen

    def next_call(self) -> None:
        self.call = n = self.call + 1
        bounds = self.bounds
        if n + 1 < len(bounds):
            self.i, self.end = bounds[n], bounds[n + 1]
        else:
            self.i = self.end = len(self.entries)

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The usual case: the operation that is next in the record, of a region that keeps nothing.
        # (Whether its operands are those of the entry does not matter: a wrong match leaves out
        # something that is read, and the replay begins again.)
        i, live = self.i, self.live
        if i < self.end and live is not None and not self.kept and not self.in_graph:
            entry = self.entries[i]
            if entry.overload is not func:
                pass
            elif live[i]:
                operator = operator_of(func)
                if not operator.takes_number:
                    self.i = i + 1
                    if self.hollow and entry.kind is not VIEW and operator.reads:
                        for t in tensors_in(args, kwargs):
                            self._need(storage_of(t))
                    self.busy = True
                    try:
                        return operator.call(*args, **kwargs) if kwargs else operator.call(*args)
                    finally:
                        self.busy = False
            elif entry.kind is NEW and type(entry.layout) is tuple:
                self.i = i + 1
                size, stride, dtype, device = entry.layout
                out = torch.empty_strided(size, stride, dtype=dtype, device=device)
                storage = out.untyped_storage()
                self.hollow[storage._cdata] = reference = weakref.ref(storage)
                self.made[storage._cdata] = i, reference
                return out
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        is_view = operator.kind is VIEW
        touched = [] if is_view else [storage_of(t) for t in tensors_in(args, kwargs)]
        i = self._matching(operator, touched)
        out = self._run(i, operator, touched, args, kwargs)
        if i >= 0 and not is_view:
            for t in [out] if type(out) is Tensor else tensors_in((out,), None):
                if (key := storage_of(t)) not in touched and key != -1:
                    self.note_made(t, i)
        return out

    def _run(self, i: int, operator: Operator, touched: list[int], args: Any, kwargs: Any) -> Any:
        """What entry ``i`` returns, or an operation that is none."""
        if i >= 0:
            if i in self.kept and (self.live is not None or self.kept[i].is_whole()):
                value = self.kept[i].value(self)
                return args[0].copy_(value) if operator.writes else value
            if self.live is not None and not self.live[i]:
                out = args[0] if operator.kind is WRITE else unwritten(self.entries[i].layout)
                for t in tensors_in((out,), None):
                    self.leave_out(t)
                return out
        if self.hollow and operator.reads and (i < 0 or self.entries[i].kind is not VIEW):
            for storage in touched:
                self._need(storage)
        if self.in_graph and operator.draws and not operator.draws_nothing(args):
            raise departures.refused(
                "a random operation can't be told from others in a graph that is traced, and would "
                "be drawn twice. Draw outside of the region, and pass what was drawn."
            )
        return operator.call(*args, **kwargs) if kwargs else operator.call(*args)

    def _matching(self, operator: Operator, touched: list[int]) -> int:
        """The entry that this operation is; -1 if there is none."""
        i, entries = self.i, self.entries
        while i < self.end and entries[i].overload is None:
            i += 1
        found = i < self.end and entries[i].overload is operator.overload
        if found:
            for maker, storage in zip(entries[i].makers, touched):
                if not self._may_have_made(maker, storage):
                    break
            else:
                self.i = i + 1
                return i
        self.i, self.in_line = self.end, False
        return -1

    def _may_have_made(self, maker: int, storage: int) -> bool:
        """Whether an entry made this memory, as far as it is known."""
        found = self.maker_of(storage) if storage in self.made else -1
        return found in (maker, -1)

    def leave_out(self, t: Tensor) -> None:
        """``t`` is not computed."""
        storage = _torch.memory_of(t)
        self.hollow[storage._cdata] = weakref.ref(storage)

    def keeping(self) -> Any:
        return self.given if self.kept else None

    def need(self, t: Tensor) -> None:
        self._need(storage_of(t))

    def _need(self, storage: int) -> None:
        hollow = self.hollow.get(storage)
        if hollow is not None and hollow() is not None:
            raise BeginAgain

    def holds_unwritten(self) -> bool:
        """Whether memory that was not computed is alive."""
        if not self.hollow:
            return False
        hollow = []
        for m, storage in self.hollow.items():
            if storage() is not None:
                hollow.append(m)
        if not hollow:
            return False
        noted = graphs.noted_after(self.since) if hollow else {}
        return any(not noted or _torch.storage_use_count(m) > 1 + noted[m] for m in hollow)
