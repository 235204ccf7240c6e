"""One call of a remat'd function: what it takes, what it met, how it runs again.

A region is a function over flat tensors, with everything else (flags, tree structures) folded into
its ``body``. Its inputs are *explicit* (the tensors among the arguments) or *captured* (tensors of
any transform level that the body reached by closure, attribute or global). Captures are found while
the body runs first; from then on they are inputs, and a region is a pure function of both.

NOTE [levels]
A region called under transforms 1..N is lowered through them from the innermost outwards. Each
level contributes a *frame* (`_rules`): it takes tensors of its level apart into values of the
level below, and, when the region runs, puts them together again at a level of the same number
which it enters afresh. So the body always runs at the bottom of the original stack, inside
throw-away levels that look to it exactly like the original ones.

NOTE [externals]
Every tensor that the body uses but did not make is an external: an explicit input, a capture, or
a constant (no transform and no tape knows it). The trace records for each operation which
externals it read, by position. A replay hands out what the forward saw at the same positions, so
that late-bound closures, rebound globals and swapped module parameters do not change it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from operator import or_
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_globals
from functx._remat import _escape
from functx._remat._aliases import PassedOn
from functx._remat._constant import Constant, let_go, still
from functx._remat._constant import unread as unread_constants
from functx._remat._holders import base_of
from functx._remat._in_turn import viewed_again
from functx._remat._interrupted import interrupted
from functx._remat._kept_inside import Inside, keeps_deep_inside
from functx._remat._leaving import can_leave, escaped, leaves_of
from functx._remat._ledger import Ledger
from functx._remat._lenient import Lenient, Met
from functx._remat._letting_go import Passing, may_pass, unread
from functx._remat._options import Options
from functx._remat._profile import shown
from functx._remat._prune import Pruned, planned
from functx._remat._recording import RecordingReplay
from functx._remat._replay import BY_SIGHT, NOTHING, Replay
from functx._remat._taken_off import hung_again
from functx._remat._tapes import rewrap
from functx._remat._tracker import tracking
from functx._remat._watch import watching
from functx._remat._whole import Whole, replayed
from functx._remat._writes import to_be_written
from functx._remat._written_back import written_back

Flat = Callable[..., "list[Tensor | None]"]
"""A function from flat tensors to flat tensors; ``None`` stands for a result that is zero."""


class Region:
    """One call of a function, as the rules see it; called with flat tensors, it runs the body.

    Attributes:
        body: the innermost function, over flat tensors.
        inputs: the explicit inputs, until the call has ended.
        options: what the caller asked for.
        reaches: the user's function, and its arguments that are no tensors.
        outer: the tracker of the region that this one is called in, until the call has ended.
        outer_levels: a context with the levels that were active at the call.
        frames: one a transform level that was peeled off, outermost level first.
        given: explicit inputs as the caller has them, weakly, where replays go by first sight.
        written_unseen: what hooks wrote to, weakly, if this is a pullback.
        began, grad_mode: the number of the first node, and the mode, of the first run.
        captured: what the body met in its first run, `n_captured` tensors.
        retained: whose gradients the body wants retained. `_gradients`.
        constants: tensors read that are no inputs.
        before: base tensors that are inputs and were written to, by id, each with a copy of before.
        rewritten: the inputs and captures that the body wrote to, by position.
        overwritten: those externals whose history it changed; they are further results.
        owners: what they are for the caller, until it has been written back.
        reached: ids of the leaves that the tapes of the first run end in.
        sightings: the runs before, if they told about this one. ``NOTE [known runs]``.
        births: what the first run made, until it is known what of that left the region.
        left: numbers of the tensors that left the region otherwise than by return.
        stored: ids of tensors in what the first run has changed.
        leaving: those that left, until the call has ended.
        settled: other tensors that left it, which no derivative flows through, until then.
        first_run: the tracker of the run that is finding out; ``None`` before and after.
        entries: the operations that the first run recorded.
        origins: kind and number of each external.
        passed_on: what the body was handed as it is, and its names, `_aliases`.
        environment: the surroundings that a replay restores.
        ledger: what ran below all transforms; ``None`` if that is not known.
        needed: for each input, explicit and captured, whether a pullback reads it.
        kept: results of operations that the policy keeps, until nodes hold them.
        inner_keeps: what regions inside keep, in the order in which they began.
        marked: whether an input has a class of its own, or attributes. `_alike`.
        connected: inputs that a pullback needs, read or not: what was kept depends on them.
        passing: for each input, whether a replay reads it but no tape of it. ``NOTE [let go]``.
        unread: for each constant, whether no pullback reads it; empty if there is none such.
    """

    # As it is in most calls; on the class, since setting two dozen attributes takes its time.
    births: Sequence[Any] = ()
    entries = given = written_unseen = births
    environment: Any = None
    first_run: Any = None
    inner_keeps: Sequence[Any] = ()
    kept: Sequence[Tensor] = ()
    ledger: Ledger | None = None
    ends: Sequence[Any] = ()  # nodes outside with hooks of the body's, until then. `_hung_at_ends`
    leaving: Sequence[Tensor] = ()
    owners = settled = leaving
    left: Sequence[int] = ()
    needed: Sequence[bool] = ()
    passing = unread = needed
    origins: Sequence[tuple[str, int]] = ()
    originals: Met | None = None  # where replays know by identity
    outer: Any = None
    outer_levels: Any = None
    began, grad_mode, marked, n_captured = 0, True, False, 0
    overwritten: Sequence[int] = ()
    passed_on: Sequence[PassedOn] = ()
    reached: Set[int] = frozenset()
    stored = reached
    retained: Sequence[Any] = ()
    hooks: Sequence[Any] = ()  # that the body hangs on what it makes. `_taken_off`
    keepers: Sequence[Any] = ()  # custom Functions that it applies. `_keepers`
    hung = inside = NOTHING  # hooks on results: the caller's, the body's
    taped: Mapping[int, dict[int, Any]] = NOTHING
    sightings: Any = None

    def __init__(
        self,
        body: Flat,
        inputs: Sequence[Tensor],
        options: Options,
        reaches: tuple[Any, Sequence[Any]] = (None, ()),
        connected: Sequence[bool] = (),
    ) -> None:
        self.connected = connected
        self.body = body
        self.reaches = reaches
        self.inputs = inputs
        self.options = options
        self.frames: list[Any] = []
        self.captured: list[Tensor] = []
        self.constants: list[Constant] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.rewritten: set[int] = set()
        # For each result of the body: its place among those it computed, or what it handed back.
        self._results: list[int | Tensor | tuple[Tensor, Tensor] | None] = []

    def __call__(self, *tensors: Tensor) -> list[Tensor | None]:
        """Run the body: the first time to find out what it needs, later to do the same again."""
        if self.first_run is not None:
            return self._find_out(tensors)
        pruned, going = self._pruned()
        if pruned is None or _torch.tracing():
            return self._again(tensors)
        passing = Passing(self.entries, self.origins, tensors, going) if going else None
        there = self.needed, self.constants
        return replayed(self._again, tensors, pruned, passing, *there, self.options.name)

    def _again(
        self, tensors: Any, pruned: Pruned | Whole | None = None, passing: Passing | None = None
    ) -> list[Tensor | None]:
        n_explicit = len(tensors) - self.n_captured
        if self.rewritten:
            tensors = [*tensors]
            for position in self.rewritten:
                kind, i = self.origins[position]
                i += n_explicit if kind == "capture" else 0
                tensors[i] = to_be_written(tensors[i])
        explicit, late = tensors[:n_explicit], tensors[n_explicit:]
        name, known = self.options.name, (self.left, self.passed_on)
        externals: list[Tensor] = []
        replay: Any = None if self.originals is None else Lenient(self, late, explicit)
        if replay is None:
            externals = [
                self.constants[i].for_replay(name)
                if kind == "constant"
                else tensors[i if kind == "input" else i + n_explicit]
                for kind, i in self.origins
            ]
            if self.options.by_sight:
                replay = BY_SIGHT[0](self, externals, len(explicit))
            elif self.options.records:
                replay = RecordingReplay(self.entries, externals, self.options, *known)
            else:
                replay = Replay(self.entries, externals, name, *known)
                replay.passing = passing
        replay.inside, replay.hooks = Inside(None, self.inner_keeps), self.hooks
        by_section = isinstance(pruned, Pruned) and pruned.sections is not None
        if by_section and isinstance(replay, Replay):
            pruned, replay.pruned = None, pruned
        try:
            outs = replay.returned(self._run_again(replay, pruned, explicit))
            replay.complete()
            still(self.constants, name)
            if pruned is not None:
                pruned.check(outs)
        except Exception as error:
            interrupted(error, name, self.entries)
            raise
        if self.overwritten:
            outs = [*outs, *(self._external(p, tensors, externals) for p in self.overwritten)]
        results = self._distinct(outs)
        if replay.left:
            results += [externals[-1 - n] if n < 0 else t for n, t in replay.left.items()]
        hung_again(self, replay, results)
        return results

    def _run_again(
        self, replay: Any, pruned: Pruned | Whole | None, explicit: Sequence[Tensor]
    ) -> list[Tensor | None]:
        environment = self.environment.restored(replay)
        if environment is None and pruned is None and torch.is_grad_enabled() == self.grad_mode:
            with tracking(replay), shown(self.options, replay=True):  # as in most calls
                replay.modes = _torch.dispatch_mode_depth()
                return self.body(*explicit)
        with (
            environment or nullcontext() as run,
            tracking(replay),
            shown(self.options, replay=True),
            pruned or nullcontext(),
            _torch_globals.grad_mode(self.grad_mode),
        ):
            replay.modes = _torch.dispatch_mode_depth()
            return self.body(*explicit) if run is None else run(self.body, *explicit)

    def _external(self, position: int, tensors: Sequence[Tensor], externals: Any) -> Tensor:
        kind, i = self.origins[position]
        if kind == "constant":
            return externals[position]
        return tensors[i + (len(tensors) - self.n_captured if kind == "capture" else 0)]

    def values(self) -> int:
        """A checksum of everything that the first run gave, if that is recorded."""
        return hash(tuple(result.bits for entry in self.entries for result in entry.results or ()))

    def want(self, *of: Any) -> None:
        """For the next replay: results that are read, kept values, inputs that go, `Asked`."""
        _wanted.of = self, *of

    def _pruned(self) -> tuple[Pruned | None, Sequence[int]]:
        of, _wanted.of = _wanted.of, None
        ours = of is not None and of[0] is self
        wanted, kept, passing, asked = of[1:] if ours else (None, (), (), None)
        ledger = self.ledger
        return (None, ()) if ledger is None else (planned(ledger, wanted, kept, asked), passing)

    def _find_out(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        first = self.first_run
        lenient = self.options.replay or self.options.determinism_check == "none"
        first.bind(self.inputs, tensors)
        ledger, self.grad_mode = first.ledger, torch.is_grad_enabled()
        with tracking(first), first.watched():
            first.modes = _torch.dispatch_mode_depth()
            outs = self.body(*tensors)
        # What was handed back without an operation on it is met here.
        returned, outs = first.returned(outs), []
        places, ordinary = dict[int, int](), True
        for out in returned:
            place = None if out is None else first.handed_back(out)
            if place is not None:
                ordinary = False
            elif out is not None and (place := places.setdefault(id(out), len(outs))) == len(outs):
                outs.append(out)
            self._results.append(place)
        if extra := first.further_results():
            self._results += range(len(outs), len(outs) + len(extra))
            outs += extra
        known = first.recognized(ordinary)
        self.reached = leaves = first.reached(known, outs)
        frames = self.frames
        if len(frames) > 1 and any(f.holds_duals() for f in frames) and frames[0].differentiates():
            first.must_run_whole()  # NOTE [gradients with tangents] in `_dual_level`
        needed = [True] * (len(tensors) + len(self.captured)) if known is None else [*known.needed]
        self.needed = needed
        if known is not None:
            self.ledger, self.sightings = known.ledger, first.sightings
            self.passing, self.unread = known.passing, known.unread
        elif ledger is not None and ledger.settle(outs, first.holders):
            self.ledger, needs = ledger, [ledger.needs(holders) for holders in first.holders]
            if not (lenient or keeps_deep_inside(first.entry)):
                may_go = may_pass(ledger, self.environment, first) and not self.options.records
                self.passing = unread(first.holders, needs, may_go, ledger.viewed, leaves, needed)
                self.unread = unread_constants(self.constants, ledger, leaves)
                for kind, i in map(first.origins.__getitem__, self.rewritten):
                    needed[i + (len(self.inputs) if kind == "capture" else 0)] = True
            first.sighted(ordinary)
        if self.connected:
            needed[:] = [*map(or_, needed, self.connected), *needed[len(self.connected) :]]
        if ledger is not None and ledger.saver is not None:
            with watching(True):  # a copy to host memory is an operation for regions around this
                self.kept = ledger.take_kept()
        first.ended()
        if lenient:
            self.originals = first.met()
        self.births = [*first.births, *first.standin_births()]  # those from -1 down
        return outs

    def escaped(self, returned: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Tensors of the first run that are held though its tape is gone, by their number."""
        births, self.births = self.births, ()
        if self.sightings is not None:
            if not _escape.any_held(births, returned):
                return {}
            self.sightings.differs()  # NOTE [known runs]: nothing was known of such a run
            self.ledger, self.needed = None, [True] * len(self.needed)
            self.passing = self.unread = ()
        known = [*returned, *(views := [r[1] for r in self._results if isinstance(r, tuple)])]
        duals = set[int]().union(*(frame.duals for frame in self.frames))
        lenient = self.originals is not None or self.options.by_sight
        f = None if lenient or self.outer is not None else self.reaches[0]
        found = escaped(births, known, duals, self.frames, f, self.stored)
        name = self.options.name
        if len(self.frames) > 1:
            self.settled = _escape.constants(births, [*found.values(), *views])
        if not found or (lenient and not (found := _escape.beyond_the_tape(births, found, known))):
            return found
        if lenient or not all(can_leave(t, n, self.frames) for n, t in found.items()):
            _escape.refuse(name, births, found)
        self.left = list(found)
        self.reached |= leaves_of(found.values(), births, self.frames, self.reached, name)
        self.leaving = [*found.values()]
        return found

    def _distinct(self, outs: Sequence[Tensor | None]) -> list[Tensor | None]:
        distinct: list[Tensor | None] = []
        for out, place in zip(outs, self._results, strict=True):
            if isinstance(place, int) and place == len(distinct):
                distinct.append(out)
        return distinct

    def write_back(self, distinct: Sequence[Tensor | None]) -> None:
        """Give inputs that the body wrote to their new history. ``NOTE [overwritten]``."""
        if not self.owners:
            return
        written_back(self.owners, self._results[-len(self.owners) :], distinct, self._write_back)
        if hasattr(self.body, "forget"):
            self.body.forget(self.owners, self.environment.before())
        self.owners = ()

    def _write_back(self, owner: Tensor, value: Tensor) -> None:
        inside = base_of(owner)
        if id(inside) in self.before and inside.grad_fn and _torch.detachable(inside):
            with _torch.cleared_interpreter_stack():
                inside.detach_()  # off the throw-away tape
        with watching(True):
            owner.copy_(value)

    def assemble(self, distinct: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The results of the body, from its distinct ones at the level of the call.

        What the body handed back is the caller's own tensor, and a view of one is a view of that.
        """
        return [
            distinct[r]
            if isinstance(r, int)
            else viewed_again(r[0], r[1], distinct, self.reached)
            if isinstance(r, tuple)
            else r
            if r is None or self.outer is not None  # which knows it by identity
            else _torch.unwrap_if_dead(r)
            for r in self._results[: len(self._results) - len(self.overwritten)]
        ]

    def computed(self, results: Sequence[Tensor | None], distinct: Any) -> list[Tensor | None]:
        """Those that the region made, not what it handed back, and what it has written to."""
        own = [out for out, r in zip(results, self._results) if not isinstance(r, Tensor)]
        return own + [distinct[r] for r in self._results[len(results) :]]

    def as_it_was(self, t: Tensor) -> Tensor:
        """``t`` with the value it had when the region was called."""
        found = self.before.get(id(base_of(t))) if self.before else None
        return t if found is None else rewrap(t, 0, found[1])

    def release(self) -> None:
        """Let go of every tensor that nodes keep: what is kept is kept once."""
        self.reaches, self.outer, self.outer_levels = (None, ()), None, None
        self._results = [r if isinstance(r, int) else None for r in self._results]
        self.inputs = self.kept = self.owners = self.leaving = self.settled = self.ends = ()
        self.captured, self.before = [], {}  # a result may be the very tensor that was written to
        if self.unread:
            let_go(self.constants, self.unread)
        for frame in self.frames:
            frame.captured, frame.inputs = [], ()
        self.frames = []  # frames know their region; knowing them too would be a cycle


class _Wanted(threading.local):
    of: Any = None  # a region, and what `Region.want` was told


_wanted = _Wanted()
