"""The first run of a region: foreign tensors are found, given a stand-in, recorded by position.

A closed-over tensor must become an input of its region; left alone, gradients to it are
*silently wrong*. A tensor that the body did not make is swapped for its stand-in before the
operation that met it runs, at first sight, so that the body runs exactly once whatever is found
late.

NOTE [made here or foreign]
The outputs of operations are remembered. What was not seen being made (gradients that the engine
hands to hooks and custom backwards) is told from foreign tensors by its tape: a walk back from it
reaches a stand-in of this region if and only if it was made here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._errors import RematError
from functx._places import where
from functx._remat import _wrappers
from functx._remat._constant import Constant
from functx._remat._entry import MADE_HERE, REWRAPPED, Entry, describe, nested_capture
from functx._remat._escape import Birth
from functx._remat._holders import Holders
from functx._remat._kept_inside import Inside, saver_of, slot_of
from functx._remat._ledger import Ledger, tell_of_a_region
from functx._remat._overwritten import Writes
from functx._remat._parts import noting_parts
from functx._remat._prune import is_unread
from functx._remat._region import Region
from functx._remat._saving import called, watched_per_example
from functx._remat._tapes import anonymous, leaves_below, nodes_of, tensors_of, tracked
from functx._remat._tracker import Tracker, rewrap
from functx._remat._unseen import refuse_unseen
from functx._remat._watch import watching
from functx._remat._writes import written_by
from functx._torch_edges import requires_grad_anywhere

_NOWHERE = where.__code__, 0  # what a region is given was made before it began


class FirstRun(Tracker):
    """The tracker of the run that finds out what the body needs.

    Args:
        region: what runs.
        lift_constants: make captures of constants too: in a graph, a region has none.
    """

    __slots__ = (
        "_depth",
        "_engine",
        "_forgotten",
        "_index",
        "_known",
        "_lift_constants",
        "_originals",
        "_region",
        "_returning",
        "_standins",
        "_start",
        "births",
        "entries",
        "entry",
        "holders",
        "leaves",
        "ledger",
        "origins",
        "writes",
    )

    def __init__(self, region: Region, *, lift_constants: bool = False) -> None:
        super().__init__()
        self._region = region
        self._lift_constants = lift_constants
        self.holders: list[Holders] = []
        # A pullback that no tape is under will not be replayed.
        idle = region.options.replay and not any(f.differentiates() for f in region.frames)
        # Where values are compared, all of them are computed again.
        pruned = region.options.prune and not (idle or region.options.values or _torch.tracing())
        self.entries: list[Entry] = []
        tell_of_a_region()
        self.entry = slot_of(region)
        decided, self.entry.inside = self.entry.inside, []
        self.inside = Inside(self.entry.inside, decided)
        self.ledger = Ledger(self.entries, saver_of(region, self.entry)) if pruned else None
        self._returning = False
        self._start = _torch.next_sequence_number()
        self._engine = _torch.current_graph_task_id()
        # id of a foreign tensor, and of its stand-in -> (that tensor, the stand-in, position)
        self._index: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.origins: list[tuple[str, int]] = []
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self.births: list[Birth] = []
        self._originals: list[Tensor] = []
        self._standins: list[Tensor] = []
        self._depth = 0
        self._forgotten: list[int] = []
        # Stand-ins that are leaves of a throw-away tape, kept so that ids stay theirs.
        self.leaves: dict[int, Tensor] = {}
        self.writes = Writes(region, self.ledger, self.leaves)

    def says_what_is_kept(self) -> None:
        """The run has ended: a replay of a region around this one is to keep the same."""
        if self.ledger is not None:
            self.entry.says(self.ledger.kept, set(self.ledger.devices), self.ledger.copied)

    def bind(self, originals: Sequence[Tensor], standins: Sequence[Tensor]) -> None:
        """The body begins, at the innermost level; explicit inputs are the first externals."""
        self.holders = [Holders(t) for t in standins]
        self._depth = _torch.interpreter_depth()
        outer = self._region.outer
        for i, (original, standin) in enumerate(zip(originals, standins, strict=True)):
            self._register("input", i, original, standin)
            if outer is not None and (known := outer.aliases.get(id(original))) is not None:
                self._index[id(known)] = (known, standin, i)
                self.aliases[id(standin)] = known
        if self._region.options.by_sight:
            # A body may close over what it is also given.
            self._region.given = [weakref.ref(t) for t in originals]

    def made(self, t: Tensor) -> None:
        """Remember that, and where, it was made."""
        # Where the operation was called that has made it.
        place = self.entries[-1].place if self.entries else None
        self.births.append((len(self.births), self.remember(t), place or where()))

    def remember(self, t: Tensor) -> weakref.ref[Tensor]:
        """Remember that it was made."""
        ref = self._known[id(t)] = weakref.ref(t)
        return ref

    def standin_births(self) -> list[Birth]:
        """Stand-ins that a gradient flows to, numbered by position from -1 down."""
        return [
            (-1 - position, weakref.ref(t), _NOWHERE)
            for position, t in enumerate(self._standins)
            # A leaf somebody may hold; or what was written to from the tape.
            if id(t) in self.leaves or t.grad_fn is not None
        ]

    def knows(self, t: Tensor) -> bool:
        """Whether ``t`` was seen being made in this run."""
        ref = self._known.get(id(t))
        return ref is not None and ref() is t

    def close(self, func: Any) -> None:
        """Record the operation."""
        if not self._region.options.by_sight:
            self.entries.append(Entry(func, tuple(self._sources), tuple(self._scalars), where()))
        self._sources.clear()
        self._scalars.clear()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation."""
        if getattr(func, "__name__", "") == "_record_function_enter_new":
            _wrappers.refuse(str(args[0]), self._region.options.name)
        try:
            out = super().run(func, args, kwargs)
            if watched_per_example():
                called(func, args, kwargs)
            return out
        except RuntimeError as error:
            if "leaf Variable that requires grad is being used in an in-place" not in str(error):
                raise
            raise RematError(
                f"remat: the region {self._region.options.name!r} writes in place, by "
                f"{describe(func)}, to a tensor that it did not make and that requires grad: a "
                "leaf, which torch lets nobody write to, or one in a trace, or with a tangent too. "
                "Write to a .clone() of it and return that, or write outside of the region."
            ) from error

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The ledger is told which operation its steps belong to."""
        ledger = self.ledger
        first = 0 if ledger is None else len(ledger.steps)
        run = noting_parts(func, self.entries, self._region.options.name)
        out = run(*args, **kwargs)
        if ledger is not None:
            ledger.belong(first, len(self.entries) - 1)
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
        targets = tensors_of(written_by(func, args, kwargs))
        if targets:
            self.written(targets)

    def written(self, tensors: Sequence[Tensor]) -> None:
        """Some of these are about to be written to, here or in a region inside this one."""
        self.writes.about_to(tensors, self.origins, self._standins, self._originals)

    def further_results(self) -> list[Tensor]:
        """What the body wrote to, and gave another history by it."""
        return self.writes.further_results(self.origins, self._standins)

    def resolve(self, t: Tensor) -> Tensor:
        """The stand-in of a foreign tensor, anything made here as it is."""
        found = self._index.get(id(t))
        if found is not None and found[0] is t:
            self._sources.append(found[2])
            return found[1]
        if self.knows(t):
            self._sources.append(MADE_HERE)
            return t
        return self._meet(t)

    def _meet(self, t: Tensor) -> Tensor:
        alive = _torch.unwrap_if_dead(t)
        in_engine = _torch.current_graph_task_id() != self._engine
        if alive is not t:
            if t.requires_grad and self._made_here(t, in_engine):
                self._sources.append(MADE_HERE)
                return t
            # What is only passed on need not be known; so it is where the level is alive.
            passed_on = self._returning and not requires_grad_anywhere(t)
            if not passed_on and (value := self._stood_for(t, alive)) is not None:
                return self._capture(t, value)
            resolved = self.resolve(alive)
            if resolved is not alive:
                return resolved
            # Its value is of this region, and it may name an input of a tape that has ended.
            self._sources[-1] = MADE_HERE
            return t
        if _torch.is_wrapped(t) and _torch.wrapper_level(t) > self._depth:
            return self._meet_wrapper(t)
        return self._meet_foreign(t, in_engine)

    def _meet_foreign(self, t: Tensor, in_engine: bool) -> Tensor:
        region = self._region
        if (in_engine or self._returning) and not requires_grad_anywhere(t):
            # A gradient that the engine handed out: made here, though nobody saw it.
            # A result that no tape knows may be passed on as it is, whoever made it.
            self._sources.append(MADE_HERE)
            return t
        if not self._lift_constants and not tracked(t):
            value = self._from_outside(t)
            if tracked(value):
                # What knew it has ended; in the replay around this region, a stand-in is it.
                return self._capture(t, value)
            position = self._register("constant", len(region.constants), t, value)
            region.constants.append(Constant(value))
            self._sources.append(position)
            return value
        if self._made_here(t, in_engine):
            self._known[id(t)] = weakref.ref(t)
            self._sources.append(MADE_HERE)
            return t
        return self._capture(t, self._from_outside(t))

    def _capture(self, t: Tensor, value: Tensor) -> Tensor:
        """Make a foreign tensor an input, by what it is for the region around this one."""
        standin = self._lift(_torch.unwrap_if_dead(value))
        position = self._register("capture", len(self._region.captured) - 1, t, standin)
        self._sources.append(position)
        return standin

    def _stood_for(self, t: Tensor, alive: Tensor) -> Tensor | None:
        """What the wrapper (not its value) is in the replay around this region, if it is there."""
        deeper = _torch.is_wrapped(alive) and _torch.wrapper_level(alive) > self._depth
        if self._region.outer is None or deeper or self.knows(alive):
            return None
        if self._made_here(alive, _torch.current_graph_task_id() != self._engine):
            return None
        value = self._from_outside(t)
        return value if tracked(value) and _torch.unwrap_if_dead(value) is value else None

    def _from_outside(self, t: Tensor) -> Tensor:
        """What a foreign tensor is for the region around this one."""
        outer = self._region.outer
        if outer is None:
            return t
        # At the levels of the outer region: ours are gone when its stand-in is still used.
        with self._region.outer_levels(), watching(False):
            (origin,) = outer.operands(nested_capture, [t])
        return origin

    def _meet_wrapper(self, t: Tensor) -> Tensor:
        """A wrapper of a transform inside the region: what it wraps may be foreign."""
        inner = t
        while _torch.is_wrapped(inner) and _torch.wrapper_level(inner) > self._depth:
            inner = _torch.get_unwrapped(inner)
        source = MADE_HERE
        if not anonymous(inner):
            self.resolve(inner)
            source = self._sources.pop()
        if source == MADE_HERE or self._standins[source] is inner:
            self._known[id(t)] = weakref.ref(t)
            self._sources.append(MADE_HERE)
            return t
        if t.requires_grad:
            raise RematError(
                f"remat: inside the region {self._region.options.name!r}, something differentiates "
                f"with respect to a tensor of shape {tuple(t.shape)} that the region closes over, "
                "in a way functx can't see. Use functx's transforms there, or pass the tensor to "
                "the region as an argument."
            )
        self._sources.append(REWRAPPED - source)
        return rewrap(t, self._depth, self._standins[source])

    def returned(self, outs: Sequence[Tensor]) -> Any:
        """The results of the body, with stand-ins for what it handed back as it was."""
        self._returning = True
        return super().returned(outs)

    def _lift(self, t: Tensor) -> Tensor:
        """Make ``t`` an input of the region while it runs."""
        region = self._region
        region.captured.append(t)
        values = [t]
        # It may be met first where the body has grad mode off.
        with watching(False), torch.enable_grad():
            for frame in reversed(region.frames):
                values = frame.capture(values)
            for frame in region.frames:
                values = frame.admit(values)
        (standin,) = values
        self.holders.append(Holders(standin))
        return standin

    def _register(self, kind: str, number: int, original: Tensor, standin: Tensor) -> int:
        position = len(self.origins)
        self.origins.append((kind, number))
        self._originals.append(original)
        self._standins.append(standin)
        self._index[id(original)] = (original, standin, position)
        self._index[id(standin)] = (standin, standin, position)
        return position

    def _made_here(self, t: Tensor, in_engine: bool) -> bool:
        """NOTE [made here or foreign]."""
        value = t
        while True:
            node = value.grad_fn
            if id(value) in self.leaves or (  # what is inside a stand-in, without its wrapper
                node is not None
                and (in_engine or _torch.sequence_number(node) >= self._start)
                and any(id(v) in self.leaves or self.knows(v) for v in leaves_below(node))
            ):
                return True
            if not _torch.is_wrapped(value):
                return False
            value = _torch.get_unwrapped(value)

    def passed_on(self) -> dict[int, weakref.ref[Tensor]]:
        """What the body was given as it is, by position. ``NOTE [aliases]`` in `_tracker`."""
        those = enumerate(zip(self._originals, self._standins))
        return {i: weakref.ref(original) for i, (original, t) in those if original is t}

    def captured_originals(self) -> list[Tensor]:
        """The captured tensors, as the body met them."""
        return [t for t, (kind, _) in zip(self._originals, self.origins) if kind == "capture"]

    def view_of(self, out: Tensor) -> tuple[Tensor, Tensor] | None:
        """The foreign tensor that ``out`` is a view of, if it is, and ``out``."""
        base = _torch.view_base(out)
        found = None if base is None else self._index.get(id(base))
        if found is None:
            return None
        kind, number = self.origins[found[2]]
        # As the region around this one knows it: the view is made there.
        captured = self._region.captured[number] if kind == "capture" else None
        return self._originals[found[2]] if captured is None else captured, out

    def original_of(self, out: Tensor) -> Tensor | None:
        """The foreign tensor that ``out`` stands for, if it does."""
        found = self._index.get(id(out))
        return None if found is None else self._originals[found[2]]

    def check_tape(self, outs: Sequence[Tensor | None]) -> set[int]:
        """Ids of the leaves that the tapes of all levels end in, which must all be known."""
        reached = leaves_below(*nodes_of(outs))
        for t in reached:
            if not (id(t) in self.leaves or self.knows(t) or is_unread(t)):
                refuse_unseen(self._region.options.name, t)
        return set(map(id, reached))

    def check_writes(self) -> None:
        """The run ended: what it wrote to must be known, or it can't run again."""
        for constant in self._region.constants:
            constant.seal(self._region.options.name)
        self.writes.refuse_aliases(self._standins)
