"""The first run of a region: what it runs is recorded, with what it reads, makes and writes to."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_observed
from functx._errors import RematError
from functx._places import Place, is_internal, where
from functx._remat import _wrappers
from functx._remat._aliases import PassedOn, passed_on
from functx._remat._apart import Reached, is_nobodys
from functx._remat._compared import Compared
from functx._remat._entry import MAKES, Entry, describe, results
from functx._remat._escape import Birth
from functx._remat._functions import IN_C, known_of
from functx._remat._functions import known as known_functions
from functx._remat._gradients import SET_DATA
from functx._remat._holders import Holders, base_of, trust_no_twins
from functx._remat._kept_inside import Inside, saver_of, slot_of
from functx._remat._known_runs import layout_of
from functx._remat._ledger import Ledger
from functx._remat._overwritten import Writes
from functx._remat._parts import noting_parts
from functx._remat._past_torch import is_foreign
from functx._remat._prune import is_unread
from functx._remat._read_results import Replayed
from functx._remat._region import Region
from functx._remat._replay import NOTHING
from functx._remat._saving import called, now, watched_per_example
from functx._remat._taken_off import hooks_of
from functx._remat._tapes import PLAIN, nodes_of, tape_below, tensors_of, tracked
from functx._remat._tracker import OBSERVERS, Tracker
from functx._remat._unseen import refuse_unseen
from functx._remat._watch import (
    all_must_run,
    beside_the_modes,
    tell_of_a_region,
    tell_of_a_view,
    unwatched,
)
from functx._remat._writes import ASKS, written_by
from functx._torch_globals import hooks_on_saved
from functx._torch_memory import shares_memory
from functx._torch_modules import frame_above

_NOWHERE = where.__code__, 0  # what a region is given was made before it began


class FirstRun(Compared):
    """The tracker of the run that finds out what the body needs.

    Args:
        region: what runs.
        lift_constants: make captures of constants too: in a graph, a region has none.
    """

    _forgotten: Sequence[int] = ()
    _instead: Mapping[int, Tensor] = NOTHING  # what replays close over for some tensors, by id
    _place: Place | None = None
    # Whether operations that only compute are recorded, and no more: `run_resolved`.
    _plain = True

    def __init__(self, region: Region, *, lift_constants: bool = False) -> None:
        super().__init__(region, lift_constants)
        # A pullback that no tape is under will not be replayed.
        options = region.options
        idle = options.replay and not any(f.differentiates() for f in region.frames)
        # Where values are compared, all of them are computed again.
        pruned = options.prune and not options.values
        self._pulls_back = options.replay
        if options.by_sight:
            self._plain = False
        tell_of_a_region()
        self.entry = slot_of(region)
        decided, self.entry.inside = self.entry.inside, []
        self.inside = Inside(self.entry.inside, decided)
        if idle or _torch.tracing():
            return
        self.look_for_others()
        if self.expected is None:
            self.ledger = Ledger(self.entries, saver_of(region, self.entry) if pruned else None)
            self.ledger.reliable = pruned

    def watched(self) -> Any:
        """What watches while the body runs."""
        if self.expected is not None:
            return unwatched(self.departs)
        return self.ledger or nullcontext()

    def ended(self) -> None:
        """A replay of a region around this one is to keep the same; the body lets go of captures.

        Nodes keep those that are read, as replays are handed them by position. What looked at them
        otherwise, at their memory or their tape, must find them as they are.
        """
        region, body, options = self._region, self._region.body, self._region.options
        if self.handles or self.keepers or self._pulls_back:
            f = region.reaches[0]
            region.hooks, region.keepers = hooks_of(self.handles, self.keepers, body, f)
            self.keepers = ()
        if theirs := self.given_a_gradient:  # which are the caller's
            self.births = [b for b in self.births if id(b[1]()) not in theirs]
        if (ledger := self.ledger or region.ledger) is None:  # a known one
            return
        if region.outer is not None:
            region.outer.looks = region.outer.looks or self.looks
            self.entry.says(ledger.kept, ledger.devices.keys(), ledger.copied)
        lenient = options.replay or options.by_sight or options.determinism_check == "none"
        lenient = lenient or self._lift_constants  # in a graph, it is run once more
        if not (lenient or self.looks or ledger.python_on_tape) and hasattr(body, "let_go"):
            on = self.handed_on
            known = self._unseen if on or self.ledger is not None else self._index.__contains__
            self._instead = body.let_go(known, self._unread() if on or region.unread else ())

    def _unseen(self, key: int) -> bool:
        """Whether Python saw nothing of a known tensor, told by its id, but what is recorded."""
        t = self._index[key][0] if key in self._index else self.handed_on.get(key)
        return t is not None and not (self.ledger is not None and self.ledger.was_exported(t))

    def _unread(self) -> Collection[int]:
        """Ids of what is only returned, and of the constants that no pullback reads."""
        unread = self._region.unread
        origins = zip(self._originals, self.origins) if unread else ()
        constants = (id(t) for t, (kind, i) in origins if kind == "constant" and unread[i])
        return {*self.handed_on, *constants}

    def bind(self, originals: Sequence[Tensor], standins: Sequence[Tensor]) -> None:
        """The body begins, at the innermost level; explicit inputs are the first externals."""
        if self.ledger is not None:
            self.holders = [Holders(t, o) for t, o in zip(standins, originals)]
        self._depth = _torch.interpreter_depth()
        self._captures_leaves = self._region.outer is None and self._at_base()
        for i, (original, standin) in enumerate(zip(originals, standins, strict=True)):
            self._register("input", i, original, standin)
        if self._region.options.by_sight:
            # A body may close over what it is also given.
            self._region.given = [weakref.ref(t) for t in originals]

    def remember(self, t: Tensor) -> None:
        """What another thread has made read what nobody saw."""
        super().remember(t)
        in_body = t.grad_fn is not None and _torch.current_graph_task_id() == self._engine
        if in_body and not self._computed_here(t):
            self.must_run_whole()

    def _computed_here(self, t: Tensor) -> bool:
        """By its memory, which it may have past torch: of an array over a tensor."""
        if self.ledger is not None and self.ledger.computed(t):
            return True
        if not is_foreign(t):
            return False
        those = (base_of(one) for _, ref, _ in self.births if (one := ref()) is not None)
        made = [one for one in those if type(one) in PLAIN]  # a fake one has no memory
        given = [*map(base_of, self._standins)]
        found = any(shares_memory(t, one) for one in made)
        found = found and not any(shares_memory(t, one) for one in given)
        if found and self.ledger is not None:
            self.ledger.reliable = False  # it knows memory by its storage, and these have two
        return found

    def _was_there(self, t: Tensor) -> bool:
        """By its memory; a wrapper may be plain in the replay of a region around this one."""
        if (ledger := self.ledger) is None or not any(f.dual() for f in self._region.frames):
            return False
        return ledger.was_there(base_of(t))

    def _capture(self, t: Tensor, value: Tensor) -> Tensor:
        """What the body computed unseen, from what functx has not seen either, a replay can't."""
        if self._computed_here(t):
            assert self.ledger is not None
            self.ledger.held_unseen(base_of(t))
        return super()._capture(t, value)

    def made(self, t: Tensor) -> None:
        """Remember that, and where, it was made."""
        # Where the operation was called that has made it.
        place = self.entries[-1].place if self.entries else None
        # As a replay numbers it, however much other operations make.
        self._number = number = max(self._number + 1, len(self.entries) << MAKES)
        birth = self._births[id(t)] = number, weakref.ref(t), place or self._begun()
        if self.layouts is not None:
            self.layouts.append(layout_of(t))
        if self._writes is None or id(t) not in self._index or t.requires_grad:
            self.births.append(birth)  # else it was there before: a buffer that counts

    def _begun(self) -> Place:
        """The line that runs what has no line of its own."""
        if self._place is None:
            self._place = where()
        return self._place

    def standin_births(self) -> list[Birth]:
        """Stand-ins that a derivative may flow to, numbered by position from -1 down."""
        return [
            (-1 - position, weakref.ref(t), _NOWHERE)
            for position, t in enumerate(self._standins)
            # A leaf somebody may hold, or is around one, or a dual; or what was written to.
            if (id(t) in self.leaves or t.grad_fn is not None or _torch.is_wrapped(t))
            and id(t) not in self.given_a_gradient
        ]

    def close(self, func: Any) -> None:
        """Record the operation."""
        options = self._region.options
        if not options.by_sight:
            if self.expected is not None and self.as_expected(func):
                return
            place: Place | None = None
            if func is not results:
                # Called by `run` or `operands`, which are no line of the user's. Nor is there one
                # for each operation of a pullback.
                place = self._begun() if options.replay else where(2)
            self.entries.append(Entry(func, tuple(self._sources), tuple(self._scalars), place))
        self._sources = []
        self._scalars = []

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation; `run_expected` and `run_resolved` do the same for nearly all of them."""
        try:
            known = known_functions[func]
        except (KeyError, TypeError):
            known = known_of(func)
        if hooks_on_saved(True) is not None:
            self.odd = True  # the body has hung them, which change what its tape holds
        if self._plain and not now.savers:
            if known.ordinary and "out" not in kwargs:
                if (expected := self.expected) is not None:
                    return self.run_expected(expected, func, args, kwargs)
                return self.run_resolved(func, self.swap_all(args), self.swap_named(kwargs))
            if known.nothing:
                return func(*args, **kwargs)
        if known.draws and self.expected is not None:
            return self._draw(func, args, kwargs)
        return self._run_any(func, args, kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw random numbers: code that does so again begins with the state of the generator."""
        environment = self._region.environment
        environment.draws()
        out = self._run_any(func, args, kwargs)
        environment.drew()
        return out

    def run_resolved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that only computes, where nobody looks at what it gives."""
        entries, ledger = self.entries, self.ledger
        operation = len(entries)
        frame: Any = frame_above(3)  # past `run` and the mode
        if not self._pulls_back:
            try:
                while is_internal[frame.f_code.co_filename]:
                    frame = frame.f_back
                place = (frame.f_code, frame.f_lasti)
            except AttributeError:  # there is nothing but torch and functx
                place = where()
        else:
            place = self._begun()
        del frame
        entries.append(Entry(func, tuple(self._sources), tuple(self._scalars), place))
        self._sources = []
        self._scalars = []
        if ledger is None:
            out = func(*args, **kwargs)
        else:
            steps = ledger.steps
            first = len(steps)
            out = func(*args, **kwargs)
            if len(steps) > first:
                ledger.belong(operation, first, len(steps))
        if out.__class__ is Tensor:
            self.made(out)
        else:
            self.note(out)
        return out

    def _run_any(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            out = Tracker.run(self, func, args, kwargs)
            if watched_per_example():
                called(func, args, kwargs)
            return out
        except RuntimeError as error:
            if "leaf Variable that requires grad is being used in an in-place" not in str(error):
                raise
            raise RematError(
                f"remat: the region {self._region.options.name!r} writes in place, by "
                f"{describe(func)}, to a tensor that it did not make and that requires grad: a "
                "leaf, which torch lets nobody write to, or one in a trace. "
                "Write to a .clone() of it and return that, or write outside of the region."
            ) from error

    def labelled(self, label: str) -> None:
        """What begins is called so in profiles."""
        _wrappers.refuse(label, self._region.options.name)

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The ledger is told which operation its steps belong to."""
        ledger = self.ledger
        run: Any = (
            func
            if func.__class__ in IN_C
            else noting_parts(func, self.entries, self._region.options.name)
        )
        if ledger is None:
            return run(*args, **kwargs)
        if known_of(func).otherwise and not any(map(tracked, tensors_of(args, kwargs))):
            return beside_the_modes(run, args, kwargs)
        first, n = len(ledger.steps), len(self.entries)
        out = run(*args, **kwargs)
        if (end := len(ledger.steps)) > first and n == len(self.entries):  # else code of the user's
            ledger.belong(n - 1, first, end)
        return out

    def drawn_from(self, generator: torch.Generator) -> None:
        """A replay must find the generator as it is now."""
        if self._region.options.preserve_rng_state:
            self._region.environment.given(generator)
        if self._region.outer is not None:  # whose replays draw from it too
            self._region.outer.drawn_from(generator)

    def must_run_whole(self) -> None:
        """Nothing may be left out of replays."""
        if self.ledger is not None:
            self.ledger.reliable = False

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep the value of constants that the operation may write to."""
        if func == SET_DATA:
            tell_of_a_view(args[1])
        elif func in ASKS:
            self.asked_for_a_gradient(args[0], all(args[1:]) and all(kwargs.values()))
        if targets := tensors_of(written_by(func, args, kwargs)):
            self.written(targets)

    def written(self, tensors: Sequence[Tensor]) -> None:
        """Some of these are about to be written to, here or in a region inside this one."""
        if self._writes is None:
            self._writes = Writes(self._region, self.ledger, self.leaves)
        self._writes.about_to(tensors, self.origins, self._standins, self._originals)

    def passed_on(self) -> list[PassedOn]:
        """What the body was given as it is, and its names. ``NOTE [aliases]`` in `_aliases`."""
        those = zip(self._originals, self._standins)
        if self.aliases or self._instead:
            return passed_on(those, self.aliases, self._instead)
        return [(i, (weakref.ref(t),)) for i, (t, standin) in enumerate(those) if t is standin]

    def further_results(self) -> list[Tensor]:
        """What the body wrote to, and gave another history by it."""
        writes = self._writes
        return [] if writes is None else writes.further_results(self.origins, self._standins)

    def returned(self, outs: Sequence[Tensor]) -> Any:
        """The results, with stand-ins for what the body handed back as it was."""
        self._returning = True
        self._region.retained = self.retained(outs)
        return super().returned(outs)

    def check_tape(self, outs: Sequence[Tensor | None]) -> Reached:
        """Ids of the leaves that the tapes of all levels end in, which must all be known."""
        made = _torch.next_sequence_number()
        nodes, reached = tape_below(nodes_of(outs))
        self.looked_at(nodes, made, reached)
        if len(self._region.frames) > 1:  # there are wrappers
            constants = (c.holders for c in self._region.constants)
            trust_no_twins([*self.holders, *(h for h in constants if h is not None)])
        if self._pulls_back and isinstance(fn := getattr(self._region.body, "fn", None), Replayed):
            fn.look(nodes, outs)
        others = {}
        for t in reached:
            if id(t) in self.leaves or is_unread(t):
                continue
            known = self.knows(t) or is_nobodys(t)
            if not (known or (self._pulls_back and self._computed_here(t))):  # in the replay
                refuse_unseen(self._region.options.name, t)
            others[id(t)] = t
        found = Reached(map(id, reached), outs, self._region.frames, nodes)
        if others:
            found.leads_elsewhere(enumerate(outs), others, self._region.options.name)
        return found

    def check_writes(self) -> None:
        """The run ended: what it wrote to must be known, or it can't run again."""
        for constant in self._region.constants:
            constant.seal(self._region.options.name)
        if self._writes is not None:
            self._writes.refuse_aliases(self._standins)


OBSERVERS.append(lambda: _torch_observed.observe_set(all_must_run))
