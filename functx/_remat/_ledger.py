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
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_globals, _torch_memory, _torch_operators
from functx._offload import Fetcher
from functx._policies import Everything
from functx._remat._arguments import NUMBERS
from functx._remat._computed import Computed
from functx._remat._holders import base_of, engine_holds, held_by_a_tape, held_by_the_engine
from functx._remat._live import needed, with_siblings
from functx._remat._saving import (
    IN_PLACE,
    Saver,
    StoodIn,
    alias,
    kept_around,
    key_of,
    stood_in,
    untouched,
)
from functx._remat._step import Kind, Step, fills, has_memory, kind_of, kinds, layout_of
from functx._remat._tapes import PLAIN, tensors_of


class Ledger(Computed):
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
        steps: what ran, in order.
        kept: keys of the results that the region keeps.
        devices: of those among them that went to host memory, by key.
        fetcher: brings these back.
        copied: steps whose results were copied when something was going to write to them.
        writes: whether anything wrote to memory.
    """

    copied: Set[int] = frozenset()
    devices: Mapping[int, torch.device] = MappingProxyType({})
    fetcher: Fetcher | None = None
    kept: Sequence[int] = ()
    writes = False
    _in_sections = 0
    _live: Set[int] = frozenset()  # keys of what a tape holds
    _runs: Sequence[bool] = ()

    def __init__(self, operations: Sequence[Any], saver: Saver | None = None) -> None:
        super().__init__()
        self._operations = operations
        self.saver = saver
        self.steps: list[Step] = []
        self._roots: set[int] = set()  # keys of what must come about
        self._sections: dict[int, tuple[int, int]] = {}
        self._exported: set[int] = set()  # storages that something else has, too
        self._read: set[int] = set()  # storages from outside that live steps read
        self._sources: list[set[int]] = []

    def __enter__(self) -> Any:
        if self.saver is not None:
            self.saver.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if self.saver is not None:
            self.saver.__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and write down what it read and made."""
        kind = kinds.get(id(func)) or kind_of(func)
        run = kind.run
        if kind.view:
            if kind.opaque:
                self.opaque(func)
            elif not self.paused:
                self.take_view(args[0])
            return run(*args, **kwargs) if kwargs else run(*args)
        if kind.scalar or (args and type(args[0]) is not Tensor):
            args, kwargs = _torch_operators.callable_arguments(func, args, kwargs or {})
        if self.paused:
            return run(*args, **kwargs) if kwargs else run(*args)
        if self.saver is not None and kind.mutable:
            written = _torch_operators.arguments_written(func, args, kwargs or {})
            self.saver.about_to_write(written)
        out = run(*args, **kwargs) if kwargs else run(*args)
        if made := self._note(kind, args, kwargs, out):
            number = len(self.steps) - 1
            if stood_in() is not StoodIn.NOTHING:
                self._offer_again(number, made)
            elif self.saver is not None and not kind.unwritten:
                self.saver.ran(number, func, args, kwargs or {}, out, made)
        return out

    def belong(self, operation: int, first: int, end: int) -> None:
        """The steps from ``first`` to before ``end`` are those of one operation of the body."""
        self._sections[operation] = first, end
        self._in_sections += end - first

    def sections(self) -> dict[int, tuple[int, int]] | None:
        """The first step of each operation of the body that has steps, and the one after its last.

        ``None`` where some steps belong to no operation.
        """
        return self._sections if self._in_sections == len(self.steps) else None

    def skipped(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """NOTE [what inner regions leave out] in `_watch`."""
        before = len(self.steps)
        self._note(kind_of(func), args, kwargs, out)
        if stood_in() is StoodIn.KEPT and len(self.steps) > before:
            self.steps[-1].handed_out = True

    def _offer_again(self, number: int, made: list[Any]) -> None:
        """A replay around this region did not run the operation: whether it keeps the result."""
        if stood_in() is StoodIn.KEPT:
            self.saver = self.saver or Saver(Everything(False))
            for place, t, storage in made:
                self.saver.given(key_of(number, place), untouched(place, t).detach(), storage)
        elif self.saver is not None:
            self.saver.left_out(number, made)

    def _note(self, kind: Kind, args: Any, kwargs: Any, out: Any) -> list[Any]:
        if self.reliable:
            try:
                made = self._write_down(kind, args, kwargs, out)
            except (RuntimeError, NotImplementedError):  # no storage: sparse, opaque, ...
                self.reliable = False
            if self.reliable:
                return made
        self.ran_unrecorded(args, kwargs, out)
        return []

    def _write_down(self, kind: Kind, args: Any, kwargs: Any, out: Any) -> list[Any]:
        """Record an operation; place, tensor and storage of each result that could be kept."""
        steps = self.steps
        number = len(steps)
        if _torch_globals.foreign_saved_tensors_hooks():
            self.reliable = False
            return []
        given = []
        for a in (*args, *kwargs.values()) if kwargs else args:
            if a.__class__ is Tensor:
                given.append(a)
            elif a.__class__ not in NUMBERS:
                if a.__class__ is list and a and a[0].__class__ is int:
                    continue  # sizes
                for t in tensors_of(a):
                    if type(t) not in PLAIN:
                        self.reliable = False
                        return []
                    given.append(t)
        writers, external = self._writers, self._external
        read = _torch_memory.storage_keys(given)
        reads: list[int] = []
        externals: list[int] = []
        for storage in read:
            if storage in writers:
                reads.append(writers[storage])
                if storage in external:
                    externals.append(external[storage])
            else:
                externals.append(external.setdefault(storage, storage))
        node = _torch.current_node_number()
        step = Step(kind, reads, externals, (len(self._operations), node))
        steps.append(step)
        if kind.plain and out.__class__ is Tensor and has_memory(out):
            memory, storage = _torch_memory.memory_of(out)
            if storage not in read:  # as nearly all do: one result, in memory of its own
                writers[storage] = number << 6
                external.pop(storage, None)
                self._made.add(memory, storage)
                step.layouts = [layout_of(out)]
                return [(0, out, storage)]
        return self._write_results(number, read, args, kwargs, out)

    def _write_results(
        self, number: int, read: Collection[int], args: Any, kwargs: Any, out: Any
    ) -> list[Any]:
        """Record what an operation gave, and wrote to."""
        step = self.steps[number]
        kind, writers, external = step.kind, self._writers, self._external
        parts = out if isinstance(out, (tuple, list)) else (out,)
        dense = all(part is None or isinstance(part, Tensor) for part in parts)
        read = set(read)
        made = []
        views = False  # of what it reads, or written in place
        for place, t in enumerate(parts if dense else tensors_of(out)):
            if t is None:
                continue
            memory, storage = _torch_memory.memory_of(t)
            if storage in read:
                views = True
                continue
            dense = dense and type(t) is Tensor and has_memory(t) and place < IN_PLACE
            made.append((place, t, storage))
            writers[storage] = key_of(number, min(place, IN_PLACE))
            external.pop(storage, None)
            self._made.add(memory, storage)
        alone = kind.writes and kind.in_place and bool(args) and out is args[0]
        if kind.writes:
            self.writes = True
            func = kind.func
            targets = tensors_of(*_torch_operators.arguments_written(func, args, kwargs or {}))
            # By what is written silently, nobody knows.
            for storage in {*_torch_memory.storage_keys(targets)} or read:
                self._wrote(number, storage, step.reads, alone=alone)
        if kind.changes_view:
            return []
        if alone:
            step.writes = True
        elif kind.writes or not (dense and kind.skippable and (made or views)):
            self._roots.add(key_of(number, IN_PLACE))
        elif made:
            step.layouts = [None if t is None else layout_of(t) for t in parts]
            return made
        return []

    def _wrote(self, number: int, storage: int, before: Sequence[int], *, alone: bool) -> None:
        """An operation wrote to some memory: it read what was there before."""
        for key in before:
            self.steps[key >> 6].rewritten = True
        if storage in self._external or storage in self._exported:
            self._roots.add(key_of(number, IN_PLACE))
        self._writers[storage] = key_of(number, IN_PLACE)
        if self.saver is not None:
            known = alone and stood_in() is StoodIn.NOTHING
            self.saver.wrote(number, storage) if known else self.saver.lost(storage)

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

    def held_unseen(self, t: Tensor) -> None:
        """A live step, in effect, reads it."""
        self._read.add(_torch.storage_key(t))

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

    def settle(self, results: Sequence[Tensor | None]) -> bool:
        """Decide which steps are live.

        Args:
            results: of the body; the engine holds them, which makes them alive, but not live.

        Returns:
            Whether that could be decided.
        """
        if self.reliable:
            try:
                self._decide(results)
            except (RuntimeError, NotImplementedError):  # a result without storage
                self.reliable = False
        return self.reliable

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
        over: dict[int, list[Tensor]] = {}  # results by their memory
        for t in results:
            if t is None:
                self._sources.append(set())
                continue
            storage = _torch.storage_key(base_of(t))
            writer = writers.get(storage)
            self._sources.append(set() if writer is None else {writer})
            over.setdefault(storage, []).append(t)
        spared = set()
        if not self.python_on_tape:
            spared = {storage for storage, those in over.items() if not held_by_a_tape(those)}
        live = {*self._roots}
        held = engine_holds()
        for storage in self._made.alive():
            if storage not in spared:
                own = held_by_the_engine(storage) if held else 0
                if not own or _torch.storage_use_count(storage) > own + 1:
                    live.add(writers[storage])
        self._made.clear()
        writers.clear()
        self._live = live
        runs, given = self._needed(live, () if self.saver is None else self.saver.keys())
        self._runs = runs
        if given:
            self.kept = sorted(given)
            runs, _ = self._needed(live)
        for step, run in zip(self.steps, runs):
            if run and step.externals:
                self._read.update(step.externals)

    def _needed(
        self, live: Iterable[int], kept: Collection[int] = (), draws: bool = True
    ) -> tuple[Sequence[bool], set[int]]:
        return needed(self.steps, live, kept, draws=draws, drawn=self.holds_regions)

    def replay_of(
        self, wanted: Sequence[int] | None, have_kept: bool
    ) -> tuple[Sequence[bool], set[int]]:
        """Which steps a replay runs, and which kept results it hands out.

        Args:
            wanted: the results that are pulled back; ``None`` for all.
            have_kept: whether the kept values are at hand.
        """
        kept = self.kept if have_kept else []
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
            return self._needed(self._roots | live, kept)
        if len(kept) == len(self.kept):
            return self._runs, {*kept}
        return self._needed(self._live)

    def needs(self, storage: int) -> bool:
        """Whether a live step reads a storage that the body did not make, or what is copied there.

        What is kept makes no difference: derivatives of it are derivatives of what it came from.
        """
        return self.python_on_tape or self._external.get(storage, storage) in self._read
