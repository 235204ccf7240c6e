"""A first run that is compared with runs before it: ``NOTE [known runs]`` in `_known_runs`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functx import _torch
from functx._remat._apart import Reached
from functx._remat._arguments import NUMBERS, TENSOR
from functx._remat._asking import Asking
from functx._remat._entry import KNOWN, MAKES, Entry
from functx._remat._escape import Birth
from functx._remat._known_runs import KnownRun, Sightings, comparable, fits, sightings_of, tape_of
from functx._remat._overwritten import Writes
from functx._remat._region import Region
from functx._remat._tapes import nodes_of


class Compared(Asking):
    """The tracker of a run that may be like runs before.

    Args:
        region: what runs.
        lift_constants: make captures of constants too: in a graph, a region has none.
    """

    # What is known of such runs, and the run that this one is compared with.
    sightings: Sightings | None = None
    expected: KnownRun | None = None
    # The surroundings that decide what runs.
    settings: Any = None
    # The layouts of what operations gave, where they count.
    layouts: list[Any] | None = None
    # Of the tape: how many nodes were made, what is compared of them, and where it ends: the frame,
    # and the place there of the input that the leaf stands for.
    nodes = 0
    tape: Any = None
    ends: Sequence[Any] = ()
    groups: Sequence[int] = ()
    # Of what was made here and written to, how often, when an operation read it.
    versions: Sequence[tuple[int, int]] = ()
    _number = -1
    _writes: Writes | None = None

    def __init__(self, region: Region, lift_constants: bool) -> None:
        super().__init__(region, lift_constants)
        self.entries: list[Entry] = []
        self.births: list[Birth] = []

    def look_for_others(self) -> None:
        """Find what is known of such runs."""
        if not self._may_be_known():
            return
        region = self._region
        surroundings = region.environment.surroundings()
        if surroundings is not None:
            levels = (*[frame.kind() for frame in region.frames],)
            self.settings = surroundings, levels
            found = sightings_of(*region.reaches, region.inputs, levels)
            if found is not None:
                self.layouts, self.sightings = [], found
                self.expected = found.expected()
                if self.expected is not None and self.expected.settings != self.settings:
                    self.expected = None  # as no run was: it needs a ledger

    def _may_be_known(self) -> bool:
        region = self._region
        return (
            region.outer is None
            and region.options.comparable
            and not self._lift_constants
            and _torch.forward_ad_level() < 0
            and (
                len(region.frames) < 2
                or not any(f.dual() or f.holds_duals() for f in region.frames)
            )
        )

    def departs(self) -> None:
        """It is no longer as was expected."""
        self.expected = None

    def reads(self, t: Tensor) -> None:
        """Note how often what was made here has been written to. ``NOTE [written unseen]``."""
        try:
            if version := t._version:
                self.versions = [*self.versions, (len(self.entries), version)]
        except RuntimeError:  # it was made in inference mode, where torch does not count
            self.odd = True

    def externals(self) -> Sequence[Tensor]:
        """What the body read that it did not make, as it saw it."""
        return self._standins

    def saw(self, t: Tensor) -> bool:
        """Whether an operation gave ``t``, or the body was given it."""
        found = self._index.get(id(t))
        return self.knows(t) or (found is not None and found[1] is t)

    def own(self, t: Tensor) -> Tensor:
        """The caller's tensor for what stands for it, which the region around this one is told."""
        own = self._own(t)
        if (outer := self._region.outer) is not None and self.had(t):
            outer.put_inside(own)
        return own

    def _own(self, t: Tensor) -> Tensor:
        """``NOTE [stored arguments]``."""
        found = self._index.get(id(t))
        if found is None or found[1] is not t or id(t) in self.given_a_gradient:
            return t
        original = self._originals[found[2]]
        as_it_was = found[2] not in self._region.rewritten and not nodes_of([t])
        return original if as_it_was and t.requires_grad == original.requires_grad else t

    def recognized(self, ordinary: bool) -> KnownRun | None:
        """What is known of this run, which had no ledger; ``None`` if it was not as expected.

        Args:
            ordinary: whether the results are all the body's own.
        """
        sightings, known = self.sightings, self.expected
        if sightings is None or self.ledger is not None:
            return None
        self.nodes = _torch.next_sequence_number() - self._start
        if known is not None and ordinary and self._usual() and known.describes(self):
            if known.ledger.pullbacks is None:
                known.ledger.pullbacks = {}  # NOTE [known pullbacks]
            return known
        sightings.differs()
        return None

    def reached(self, known: KnownRun | None, outs: Sequence[Tensor | None]) -> Reached:
        """The leaves that the tapes of the results end in; of a known run, they are known."""
        if known is None:
            found = self.check_tape(outs)
            self.groups = found.groups
            return found
        frames = self._region.frames
        found = Reached([frames[n].leaves[i] for n, i in known.ends], outs, frames)
        found.relate(known.relations, self._start)
        found.groups = known.groups
        return found

    def relations(self) -> Any:
        """Which results are computed from which others, by numbers from this run's first on."""
        reached: Any = self._region.reached
        return reached.relations(self._start)

    def check_tape(self, outs: Sequence[Tensor | None]) -> Reached:
        """The leaves that the tapes end in."""
        raise NotImplementedError

    def looked_at(self, nodes: Sequence[Any], made: int, leaves: Sequence[Tensor]) -> None:
        """The tapes of a run that was watched.

        Args:
            nodes: on them.
            made: the number of the next one that is made.
            leaves: that they end in.
        """
        if self.on_nodes:
            self.move_hooks(leaves)
        if self.sightings is not None and self.ledger is not None:
            frames = enumerate(self._region.frames)
            places = {leaf: (n, i) for n, f in frames for i, leaf in enumerate(f.leaves)}
            self.nodes, self.ends = made - self._start, [*map(places.get, map(id, leaves))]
            self.tape = tape_of(nodes, self._start)

    def sighted(self, ordinary: bool) -> None:
        """The run had a ledger, which has decided: remember what it found out."""
        region, ledger = self._region, self.ledger
        if self.sightings is None or ledger is None:
            return
        if ordinary and self._usual() and comparable(self, ledger):
            known = KnownRun(self, ledger, region.needed, region.passing, region.unread)
            self.sightings.saw(known, self)
        else:
            self.sightings.differs()

    def _usual(self) -> bool:
        return not self.odd and (self._writes is None or self._writes.plain)

    def as_expected(self, func: Any) -> bool:
        """Whether the operation under way is the known run's, whose entry then serves for both."""
        entries, known = self.entries, self.expected.entries  # type: ignore[union-attr]
        if (at := len(entries)) < len(known) and fits(
            known[at], func, self._sources, self._scalars
        ):
            entries.append(known[at])
            self._sources = []
            self._scalars = []
            return True
        self.departs()
        return False

    def run_expected(self, known: KnownRun, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that only computes, and is the known run's so far as anybody can tell.

        As `swap_all`, `as_expected` and `made`, in one piece: most operations come by here.
        """
        index, births, sources = self._index, self._births, self._sources
        scalars = self._scalars
        swapped: list[Any] = []
        for a in args:
            if isinstance(a, Tensor):
                if scalars:
                    scalars.append(TENSOR)
                key = id(a)
                if key in index and (found := index[key])[0] is a:
                    sources.append(found[2])
                    a = found[1]
                elif (birth := births.get(key)) is not None and birth[1]() is a:
                    sources.append(KNOWN - birth[0])
                    try:
                        if a._version:  # of a fresh one it is 0
                            self.reads(a)
                    except RuntimeError:  # it was made in inference mode
                        self.odd = True
                else:
                    a = self._meet(a)
                    if sources[-1] < 0:
                        self.odd = True
            elif a.__class__ in NUMBERS:
                scalars.append(a)
            else:
                a = self.swap(a)
            swapped.append(a)
        if kwargs:
            kwargs = self.swap_named(kwargs)
        entries = self.entries
        at = len(entries)
        entry = known.entries[at] if at < len(known.entries) else None
        if entry is None or not fits(entry, func, sources, scalars):
            self.departs()
            return self.run_resolved(func, swapped, kwargs)
        entries.append(entry)
        self._sources = []
        self._scalars = []
        out = func(*swapped, **kwargs) if kwargs else func(*swapped)
        if out.__class__ is not Tensor:
            self.note(out)
            return out
        number = (at + 1) << MAKES
        if number <= self._number:
            number = self._number + 1
        self._number = number
        made: Any = number, weakref.ref(out), entry.place
        self._births[id(out)] = made
        self.births.append(made)
        self.layouts.append((out.shape, out.dtype, out.requires_grad))  # type: ignore[union-attr]
        return out

    def run_resolved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation on resolved arguments, which is not recorded yet."""
        raise NotImplementedError
