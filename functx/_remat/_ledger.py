"""What a body ran below all transforms, and what of it a pullback reads.

A dispatch mode under the first run writes down every ATen operation but views, of which torch makes
more or fewer depending on what requires grad: which earlier ones wrote what it reads. When the body
has returned, the results of operations that are still alive, results of the body aside, are what
some tape has saved. These are what a pullback reads, and the operations they come from are *live*;
so are those whose results Python looked at. Nothing has to be traced or cached for that, so it
can't be stale: it is known anew for each call.
``NOTE [alive]`` in `_holders` says what counts as alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import filterfalse
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._offload import Fetcher
from functx._policies import Everything
from functx._remat._asked import Asked, read_for
from functx._remat._holders import (
    Holders,
    base_of,
    engine_holds,
    held_by_a_tape,
    held_by_the_engine,
)
from functx._remat._live import needed, with_siblings
from functx._remat._read_by import Readers
from functx._remat._record import Record
from functx._remat._saving import IN_PLACE, Saver, alias, kept_around
from functx._remat._step import fills, has_memory, layout_of
from functx._remat._tangents import has_tangents, memory_of_duals
from functx._remat._written_since import Shared


class Ledger(Record):
    """Writes down what runs. Afterwards, `settle` says which steps are live.

    NOTE [siblings]
    Where only some results are pulled back, what the tape saved for the others is dead. A node
    reads what its operation read, and what else the operation made: a batched operator may be a
    loop over examples and one stack for each result, none of which comes after another. Python
    (a custom Function, a hook) may read anything that it can reach; where there is any, all
    results count as read, and so do all inputs.

    Args:
        operations: those of the body, so far.
        saver: asks the policy of the region what to keep; ``None`` where it keeps nothing.

    Attributes:
        kept: keys of the results that the region keeps.
        devices: of those among them that went to host memory, by key.
        fetcher: brings these back.
        copied: steps whose results were copied when something was going to write to them.
        plans: what replays run, by what they are for: found out once.
        shared: what others hold as well of what is kept. `_written_since`
        pullbacks: those that are known; ``None`` where the run is none of those that are.
    """

    copied: Set[int] = frozenset()
    devices: Mapping[int, torch.device] = MappingProxyType({})
    fetcher: Fetcher | None = None
    kept: Sequence[int] = ()
    pullbacks: dict[Any, Any] | None = None
    shared: Sequence[Shared] = ()
    _given: Sequence[int | None] | None = None  # memory of the inputs
    _in_sections = 0
    _live: Set[int] = frozenset()  # keys of what a tape holds
    _runs: Sequence[bool] = ()
    _untold = -1

    def __init__(self, operations: Sequence[Any], saver: Saver | None = None) -> None:
        super().__init__(operations, saver)
        self._sections: dict[int, tuple[int, int]] = {}
        self._read: set[int] = set()  # storages from outside that live steps read
        self._readers: dict[int, int] = {}  # by the key of what a tape holds: NOTE [read by]
        self._sources: list[set[int]] = []
        self.plans: dict[Any, Any] = {}

    def __enter__(self) -> Any:
        if self.saver is not None:
            self.saver.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if self.saver is not None:
            self.saver.__exit__(*exc)

    def belong(self, operation: int, first: int, end: int) -> None:
        """The steps from ``first`` to before ``end`` are those of one operation of the body."""
        self._sections[operation] = first, end
        self._in_sections += end - first

    def sections(self) -> dict[int, tuple[int, int]] | None:
        """The first step of each operation of the body that has steps, and the one after its last.

        ``None`` where some steps belong to no operation.
        """
        return self._sections if self._in_sections == len(self.steps) else None

    def exported(self, t: Tensor) -> None:
        """What is there, and what comes to be there, must come about in replays too."""
        try:
            storage = _torch.storage_key(t)
        except (RuntimeError, NotImplementedError):  # no storage: sparse, opaque, ...
            return
        self._exported.add(storage)
        self._read.add(self._external.get(storage, storage))
        if storage in self._writers:
            self._roots.add(self._writers[storage])
        if self.saver is not None:
            self.saver.exported(storage)

    def looked_at(self) -> bool:
        """Whether Python may have got at values, or at the tape, in a way that is not recorded."""
        return self.python_on_tape or bool(self._exported)

    def was_exported(self, t: Tensor) -> bool:
        """Whether what is in the memory of ``t`` was handed to what is no operation."""
        base = base_of(t)
        return not has_memory(base) or _torch.storage_key(base) in self._exported

    def held_unseen(self, t: Tensor) -> None:
        """A live step, in effect, reads it."""
        if t.layout is torch.strided:
            self._read.add(_torch.storage_key(t))
        else:  # it has several, or none
            self.reliable = False

    def named(self, t: Tensor, name: str) -> bool:
        """A value was given a name.

        Returns:
            Whether it can be kept under it: the region made it, and it is all of its memory.
        """
        storage = _torch.storage_key(t)
        if not self.reliable or storage in self._external or storage not in self._writers:
            return True
        key = self._writers[storage]
        layouts = self.steps[key >> 6].layouts
        made = None if layouts is None or key & IN_PLACE == IN_PLACE else layouts[key & IN_PLACE]
        # What a replay hands out is the operation's result, of which ``t`` may be a view.
        layout = layout_of(t) if made is None else made
        if not (fills(t, layout_of(t)) and fills(t, layout)):
            return False
        if self.saver is not None:
            self.saver.named(t, storage, name, layout)
        return True

    def settle(
        self, results: Sequence[Tensor | None], holders: Sequence[Holders] | None = None
    ) -> bool:
        """Decide which steps are live.

        Args:
            results: of the body; the engine holds them, which makes them alive, but not live.
            holders: of its inputs.

        Returns:
            Whether that could be decided.
        """
        if self.reliable:
            try:
                self._decide(results)
                self._given = None if holders is None else [h.storage for h in holders]
            except (RuntimeError, NotImplementedError):  # a result without storage
                self.reliable = False
        return self.reliable

    def forgettable(self) -> bool:
        """Whether nothing in it is of this very run alone. ``NOTE [known runs]``."""
        return (
            self.reliable
            and not (self.looked_at() or self.holds_regions or self.kept or self.copied)
            and self.saver is None
            and self.sections() is not None
        )

    def agrees(self, other: Ledger) -> bool:
        """Whether another one has the same steps, and the same of them live."""
        return (
            self._runs == other._runs
            and self._live == other._live
            and (self._readers, self._untold) == (other._readers, other._untold)
            and self._sections == other._sections
            and len(self.steps) == len(other.steps)
            and all(a.agrees(b) for a, b in zip(self.steps, other.steps))
        )

    def take_kept(self) -> list[Tensor]:
        """The values that the region keeps, in the order of `kept`."""
        saver, self.saver = self.saver, None
        if saver is None:
            return []
        self.copied = saver.copied
        keys = self.kept if self.reliable else []
        values, self.devices = saver.take(keys)
        if self.devices:
            hosts = {key: t for key, t in zip(keys, values) if key in self.devices}
            self.fetcher = Fetcher(hosts, self.devices)
        return values

    def let_go(self) -> None:
        """The run has ended, however it did: hold nothing any more."""
        saver, self.saver = self.saver, None
        if saver is not None:
            saver.let_go()

    def _decide(self, results: Sequence[Tensor | None]) -> None:
        for storage, kept in kept_around().items():
            if storage in self._writers and storage not in self._external:
                self.saver = self.saver or Saver(Everything(False))
                self.saver.given(self._writers[storage], alias(kept), storage)
        writers = self._writers
        spared: set[int] = set()
        if _torch.forward_ad_level() >= 0:
            given = [t for t in results if t is not None]
            found, held = memory_of_duals(given)
            memory = iter(found)
            for t in results:
                storages = () if t is None else next(memory)
                self._sources.append({writers[each] for each in storages if each in writers})
            if not self.python_on_tape:
                spared = set().union(*found) - held
        else:
            over: dict[int, list[Tensor]] = {}  # results by their memory
            for t in results:
                if t is None:
                    self._sources.append(set())
                    continue
                storage = _torch.storage_key(base_of(t))
                writer = writers.get(storage)
                self._sources.append(set() if writer is None else {writer})
                over.setdefault(storage, []).append(t)
            if not self.python_on_tape:
                spared = {storage for storage, those in over.items() if not held_by_a_tape(those)}
        if self._statistics:  # which a replay advances only for who reads them in it
            read = {key for step in self.steps for key in step.reads}
            self._roots |= self._statistics if self.python_on_tape else self._statistics & read
        live = {*self._roots}
        alive = self._made.alive()
        if engine_holds():
            for storage in alive:
                own = held_by_the_engine(storage)
                if own and _torch.storage_use_count(storage) <= own + 1:
                    spared.add(storage)
        live.update(map(writers.__getitem__, filterfalse(spared.__contains__, alive)))
        self._made.clear()
        if live and sum(map(bool, self._sources)) > 1 and not (self.python_on_tape or self.packed):
            readers = Readers(results)
            self._untold = readers.untold
            for storage, mask in readers.of.items():
                if storage in writers:
                    key = writers[storage]
                    self._readers[key] = self._readers.get(key, 0) | mask
        writers.clear()
        self._live = live
        runs, handed_out = self._needed(live, () if self.saver is None else self.saver.keys())
        self._runs = runs
        if handed_out:
            self.kept = sorted(handed_out)
            runs, _ = self._needed(live)
        for step, run in zip(self.steps, runs):
            if run and step.externals:
                self._read.update(step.externals)

    def _needed(
        self, live: Iterable[int], kept: Collection[int] = (), draws: bool = True
    ) -> tuple[Sequence[bool], set[int]]:
        return needed(self.steps, live, kept, draws=draws, drawn=self.holds_regions)

    def replay_of(
        self, wanted: Sequence[int] | None, have_kept: bool, asked: Asked | None = None
    ) -> tuple[Sequence[bool], set[int]]:
        """Which steps a replay runs, and which kept results it hands out.

        Args:
            wanted: the results that are pulled back; ``None`` for all.
            have_kept: whether the kept values are at hand.
            asked: what for; ``None`` for the gradients of all inputs.
        """
        kept = self.kept if have_kept else []
        read = None if asked is None else self._read_for(asked)
        known = len(self._sources)  # tensors that left otherwise than by return come after
        some = wanted is not None and len(wanted) < known and all(i < known for i in wanted)
        if some and not self.python_on_tape:
            # What a tape saved belongs to the results that come after it. What none comes after
            # was made for the tape alone (the value before an in-place operation, say).
            for_some, _ = self._needed(set().union(*self._sources), draws=False)
            live_steps, _ = self._needed(self._live)
            begin = (key >> 6 for i in wanted or () for key in self._sources[i])
            these = with_siblings(self.steps, live_steps, begin)
            live = {k for k in self._live if not for_some[k >> 6] or k >> 6 in these}
            places = sum(1 << i for i in wanted or ())
            if not self._untold & places:  # NOTE [read by]
                live = {k for k in live if self._readers.get(k, places) & places}
            if read is not None:
                live &= read
            return self._needed(self._roots | live, kept)
        if read is not None:
            return self._needed(self._roots | read, kept)
        if len(kept) == len(self.kept):
            return self._runs, {*kept}
        return self._needed(self._live)

    def _read_for(self, asked: Asked) -> set[int] | None:
        """What tapes hold that is read for some gradients; ``None`` if it can't be told."""
        given, external = self._given, self._external
        if given is None or self.python_on_tape or self.packed or self.holds_regions:
            return None
        if any(step.handed_out for step in self.steps):  # its history does not show
            return None
        storages = set()
        for i in asked.inputs:
            if (storage := given[i]) is None:
                return None
            storages.add(external.get(storage, storage))
        if self.writes:  # what autograd copies before belongs to the operation
            asked = asked._replace(plainly=False)
        return read_for(asked, storages, self.steps, self._live)

    def needs(self, given: Holders) -> bool:
        """Whether a live step reads what the body was given, or what is copied there.

        What is kept makes no difference: derivatives of it are derivatives of what it came from.
        Tangents count as read.
        """
        storage = given.storage
        return (
            self.python_on_tape
            or (storage is not None and self._external.get(storage, storage) in self._read)
            or (_torch.forward_ad_level() >= 0 and has_tangents(given.tensor))
        )
