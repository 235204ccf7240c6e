"""Ledgers: dispatch modes that record a region's operations, and run them again in a replay.

A ledger works below autograd and all transforms.

NOTE [leaving out]
After a region has run, the memory that is still alive is the memory that its tape reads, apart from
the results. A walk back through the record, starting from that memory, finds the operations that a
replay must run. For each other operation the replay hands out uninitialized memory. The replay
checks that this memory is never read. If an operation is about to read it, or if a tape still holds
it at the end, the replay begins again and runs everything. So a wrong record costs time, but never
gives a wrong number.

Operations are matched within the user's call that ran them, because the number of operations in a
call may depend on which tapes are alive. From the first operation that does not match, everything
runs until the end of that call. If the region saves no values, only the operators are compared,
because this is quick. One operation may then be mistaken for another one with the same operator.
If an operation is left out by mistake, the replay notices when its result is read, and begins
again. The placeholder of that operation may also have a wrong shape, which may lead to any error.
So the replay begins again after an error, too, and runs everything.

A mode does not see what a kernel of an extension reads. Therefore the replay leaves nothing out if
a custom Function is on the tape. Some memory is allocated empty or zero, and the ledger never sees
it being filled: the replay leaves out nothing before the last operation that reads such memory.
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
    makers: Sequence[int] = ()  # for each operand the entry that made it; -1 if no entry did


class Ran(NamedTuple):
    """The operations that a forward has run, and which of them its replays run."""

    entries: list[Entry]
    starts: list[int]  # for each call the index of its first entry
    live: Any = None  # the entries that a replay runs; ``None`` for all
    left_out: int = NEVER  # the first call that leaves an entry out, or hands out a saved value
    in_graph: bool = False  # whether a graph was traced; random numbers are then saved
    bounds: Sequence[int] = ()  # the starts, and the end of the last call


class Ledger(_torch.TorchDispatchMode):
    """A dispatch mode that knows which of the user's calls is running."""

    supports_higher_order_operators = True
    _should_skip_dynamo = _torch.never_skip_dynamo
    saver: Any = None  # saves the values that a policy wants
    # The names that `checkpoint_name` gave, in this region and in regions inside it:
    names: frozenset[str] = frozenset()

    def __init__(self) -> None:
        # While an operation is in this mode, calls come from the engine and not from user code.
        self.busy = False
        # By the address of each storage made inside: the number of the entry that made it, and a
        # weak reference to the storage, because a later storage may get the same address.
        self.made: dict[int, tuple[int, Any]] = {}
        self.since = graphs.last_node()

    def maker_of(self, storage: int) -> int:
        """The entry that made this memory; -1 if no entry did."""
        number, reference = self.made.get(storage, (-1, None))
        return number if reference is None or reference() is not None else -1

    def note_made(self, t: Tensor, number: int) -> None:
        """Note that entry ``number`` made the memory of ``t``."""
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
        """Note that a call of user code begins."""

    def need(self, t: Tensor) -> None:
        """Note a read of the memory of ``t``, perhaps outside of torch, as in ``numpy()``."""

    def keeping(self) -> Any:
        """The collection that lists the memory of saved values; ``None`` if nothing is saved."""
        return self.saver


def ledgers() -> list[Ledger]:
    """All active ledgers, outermost first, with those of enclosing regions and their replays."""
    modes = map(_torch.dispatch_mode_at, range(_torch.dispatch_depth()))
    return [mode for mode in modes if isinstance(mode, Ledger)]


def is_left_out() -> bool:
    """Whether a replay that is running has left out an operation so far."""
    return any(isinstance(mode, Rerun) and mode.hollow for mode in ledgers())


def read_outside(tensors: Sequence[Tensor]) -> None:
    """Note that code which no mode sees is about to read these tensors."""
    for ledger in ledgers():
        for t in tensors:
            ledger.need(levels.base_of(t))


class Record(Ledger):
    """The ledger of a forward."""

    def __init__(self, draws: Draws | None, in_graph: bool = False) -> None:
        super().__init__()
        self.draws, self.in_graph = draws, in_graph
        self.entries: list[Entry] = []
        self.starts = [0]  # for each call the index of its first entry
        self.written: list[int] = []  # memory of inputs that this call has written
        # Its `about_to_write` is called before the region writes to memory that it did not make:
        self.writes: Any = None
        # Whether this call draws random numbers, or writes to memory that it did not make:
        self.draws_now = self.writes_now = False
        self.followed = 0  # how many entries come from a script that the run followed at first
        self.blind = False  # whether code has run that no mode sees
        # Entries that allocated empty or zero memory which no recorded operation has filled:
        self.blank: set[int] = set()

    def next_call(self) -> None:
        self.starts.append(len(self.entries))

    def go_on_from(self, ran: Ran, calls: int) -> None:
        """Go on recording after the first ``calls`` calls of an earlier run.

        This run followed the earlier one so far, and did not record who made which memory. A
        replay therefore runs all of these entries.
        """
        ends = ran.starts[calls + 1 :] or [len(ran.entries)]
        self.starts, self.entries = ran.starts[: calls + 1], ran.entries[: ends[0]]
        self.followed = len(self.entries)
        blank = any(operator_of(e.overload).is_blank for e in self.entries if e.overload)
        self.blind = blank or ran.live is None

    def has_made(self, storage: int) -> bool:
        """Whether the region made this memory."""
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
            # The extension's operator drew random numbers without a tag, so a replay must run it.
            kind, self.draws_now = ALWAYS, True
            self.draws.note_unseen()  # type: ignore[union-attr]
        self._note(operator, kind, touched, written, out)
        if self.saver is not None:
            self.saver.judge(len(self.entries) - 1, self.entries[-1], args, kwargs or {}, out)
        return out

    def _note(
        self, operator: Operator, kind: str, touched: list[int], writes: list[int], out: Any
    ) -> None:
        """Record an operation that has run, and the memory that it has made."""
        reads, makers = touched if operator.reads else [], [*map(self.maker_of, touched)]
        for t in [out] if type(out) is Tensor else tensors_in((out,), None):
            if (key := storage_of(t)) not in touched:
                if key != -1:
                    self.note_made(t, len(self.entries))
                writes.append(key)
        layout = None
        if kind is NEW and not _is_plain(out):
            kind = ALWAYS
        elif kind is NEW and not writes:  # it returned views of its operands
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
        """The operations that a replay must run so that the memory in ``needed`` is computed."""
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
    """The memory made by the region that its tape reads.

    This is the memory that is alive, except for that of results and of saved values. References
    are counted exactly. A tensor is held by its Python object, by wrappers around it, and by its
    views. A storage is held by tensors and by its own Python object. If there is one more
    reference, it comes from the tape. ``results`` has the results of the body, and the plain
    tensors at the lowest level that they wrap.
    """
    alive, noted = set(filter(record.has_made, record.made)), graphs.noted_after(record.since)
    if noted:
        alive = {m for m in alive if _torch.storage_use_count(m) > 1 + noted[m]}
    family = [*{id(t): t for t in (*results, *kept)}.values()]
    holders = dict.fromkeys(map(id, family), 0)  # by id: how many tensors of the family hold it
    for t in family:  # (the loop appends to it)
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
            # (One of the references is that of the storage's Python object.)
            users[storage] = users.get(storage, 1 + noted[storage]) + 1
        if t._use_count() > 1 + holders[id(t)]:  # type: ignore[attr-defined]
            on_tape.add(storage)
    for storage, n in users.items():
        if storage not in on_tape and _torch.storage_use_count(storage) <= n:
            alive.discard(storage)
    return alive


def leave_out(region: Region, record: Record, results: list[Tensor]) -> Ran:
    """Find the operations that a replay leaves out.

    These are the operations that no living memory depends on, and those whose results the policy
    has saved.
    """
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
        live = None  # code that no mode sees may read any memory, so the replay runs everything
    elif saver is None and (at := live.find(0)) >= 0:
        left_out = bisect_right(record.starts, at) - 1
    in_graph = any(e.kind is DRAWN for e in record.entries)
    bounds = (*record.starts, len(record.entries))
    return Ran(record.entries, record.starts, live, left_out, in_graph, bounds)


def _is_plain(out: Any) -> bool:
    """Whether uninitialized memory can stand in for the results: only dense, plain tensors."""
    if isinstance(out, (list, tuple)):
        return all(map(_is_plain, out))
    return out is None or type(out) is int or (_torch.is_dense(out) and storage_of(out) != -1)


def layout_of(out: Any) -> Layout:
    """The layout of results, in the same nested structure."""
    if isinstance(out, Tensor):
        return out.size(), out.stride(), out.dtype, out.device
    return out if out is None or type(out) is int else [layout_of(o) for o in out]


def filled(layout: Layout, one: Callable[[Any], Any]) -> Any:
    """Results of this layout; ``one`` makes each tensor from the layout of that tensor."""
    if type(layout) is list:
        return [filled(part, one) for part in layout]
    return one(layout) if type(layout) is tuple else layout


def unwritten(layout: Layout) -> Any:
    """Uninitialized memory of this layout, which must not be read (see NOTE [leaving out])."""
    return filled(layout, lambda x: torch.empty_strided(*x[:2], dtype=x[2], device=x[3]))


class BeginAgain(BaseException):
    """A replay was about to read memory that it has not computed (see NOTE [leaving out])."""


class Rerun(Ledger):
    """The ledger of a replay.

    It runs the operations that are live. For the others it hands out saved values or uninitialized
    memory.
    """

    draws_again = False  # whether the replay has restored the states of generators

    def __init__(self, ran: Ran, live: Any, kept: Any, calls: int) -> None:
        """Prepare to listen after the first ``calls`` calls of the replay."""
        # This sets the attributes of `Ledger`, too. It does not call `super().__init__()`, because
        # it runs at each replay.
        self.busy, self.made = False, {}
        self.since = graphs.last_node() if _torch.dispatch_depth() else None
        self.entries, self.kept = ran.entries, kept
        self.bounds = ran.bounds  # for each call its first entry; then the end of the last call
        self.live = live  # the entries to run; ``None`` runs all
        self.in_graph = ran.in_graph
        # Memory that was not computed: a weak reference to each storage, by its address.
        self.hollow: dict[int, Any] = {}
        self.given: set[int] = set()  # memory of saved values that were handed out
        self.call = calls - 1
        self.next_call()

    def next_call(self) -> None:
        self.call = n = self.call + 1
        bounds = self.bounds
        if n + 1 < len(bounds):
            self.i, self.end = bounds[n], bounds[n + 1]
        else:
            self.i = self.end = len(self.entries)

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The common case, written for speed: the region saves no values, and the operation is the
        # next one in the record. The operands are not compared. After a wrong match something is
        # left out that is read later, and then the replay begins again.
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
        """Return the results of entry ``i``, or run an operation that has no entry (-1)."""
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
                "this random operation of a traced graph can't be matched with the forward's, so "
                "the replay would draw other numbers. Draw them outside of the region, and pass "
                "them in as arguments."
            )
        return operator.call(*args, **kwargs) if kwargs else operator.call(*args)

    def _matching(self, operator: Operator, touched: list[int]) -> int:
        """The entry that this operation matches; -1 if it matches no entry."""
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
        self.i = self.end
        return -1

    def _may_have_made(self, maker: int, storage: int) -> bool:
        """Whether this entry may have made this memory; true if the maker is unknown."""
        found = self.maker_of(storage) if storage in self.made else -1
        return found in (maker, -1)

    def leave_out(self, t: Tensor) -> None:
        """Note that the memory of ``t`` is not computed."""
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
        """Whether memory that was not computed is still alive."""
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
