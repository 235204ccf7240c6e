"""Foreign tensors met in the first run of a region: found, and given a stand-in.

A closed-over tensor must become an input of its region; left alone, gradients to it are
*silently wrong*. A tensor that the body did not make is swapped for its stand-in before the
operation that met it runs, at first sight, so that the body runs exactly once whatever is found
late.

NOTE [made here or foreign]
The outputs of operations are remembered. What was not seen being made (gradients that the engine
hands to hooks and custom backwards) is told from foreign tensors by its tape: a walk back from it
reaches a stand-in of this region if and only if it was made here. What is on no tape is told by its
memory, which the ledger has seen the body write.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from functx import _torch
from functx._errors import RematError, not_initialized
from functx._remat._about_gradients import AboutGradients
from functx._remat._arguments import NUMBERS, TENSOR
from functx._remat._constant import Constant
from functx._remat._entry import KNOWN, MADE_HERE, REWRAPPED, nested_capture
from functx._remat._holders import Holders
from functx._remat._ledger import Ledger
from functx._remat._lenient import Met, met_as
from functx._remat._region import Region
from functx._remat._replay import NOTHING
from functx._remat._tapes import (
    PLAIN,
    anonymous_below,
    below,
    leads_to,
    leaves_below,
    nodes_of,
    of_ended_level,
    rewrap,
    tracked,
)
from functx._remat._unseen import refuse_unseen
from functx._remat._watch import watching
from functx._torch import peek_interpreter_stack, unwrap_once_if_dead
from functx._torch_edges import requires_grad_anywhere

_UNNUMBERED = KNOWN - MADE_HERE  # what was made here, and no operation of the record has made


class Standins(AboutGradients):
    """What the body reads of what it did not make, by position, and what it sees instead.

    Args:
        region: what runs.
        lift_constants: make captures of constants too: in a graph, a region has none.
    """

    _returning = False
    handed_on: Mapping[int, Tensor] = NOTHING  # what it only returns, by id
    _depth = 0
    # Who watches what runs below; then it is asked who holds inputs and captures.
    ledger: Ledger | None = None
    # Whether leaves of plain autograd that are met are captured without further questions, while no
    # transform is active.
    _captures_leaves = False
    # How many leaves there were, and what each stands for.
    _given: tuple[int, dict[int, Tensor]] = 0, {}

    def __init__(self, region: Region, lift_constants: bool) -> None:
        super().__init__()
        self._region = region
        if region.outer is not None:
            self.aliases = region.outer.aliases
        self._lift_constants = lift_constants
        self.holders: list[Holders] = []
        region.began = self._start = _torch.next_sequence_number()
        self._engine = _torch.current_graph_task_id()
        # id of a foreign tensor, and of its stand-in -> (that tensor, the stand-in, position)
        self._index: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.origins: list[tuple[str, int]] = []
        # By id, what was made here: its number, the tensor, and where it was made.
        self._births: dict[int, tuple[int, weakref.ref[Tensor], Any]] = {}
        self._originals: list[Tensor] = []
        self._standins: list[Tensor] = []
        # Captures that no level that ended had made.
        self._lasting: list[Tensor] = []
        # Stand-ins that are leaves of a throw-away tape, kept so that ids stay theirs.
        self.leaves: dict[int, Tensor] = {}
        self.given_a_gradient: dict[int, Tensor] = {}  # of those, the caller's own

    def remember(self, t: Tensor) -> None:
        """Remember that it was made."""
        self._births[id(t)] = _UNNUMBERED, weakref.ref(t), None

    def knows(self, t: Tensor) -> bool:
        """Whether ``t`` was seen being made in this run."""
        birth = self._births.get(id(t))
        return birth is not None and birth[1]() is t

    def swap_all(self, values: Sequence[Any]) -> list[Any]:
        """What every operation comes by: as `resolve` for each tensor, in one loop."""
        index, births, sources = self._index, self._births, self._sources
        swapped = []
        for a in values:
            if isinstance(a, Tensor):
                if self._scalars:
                    self._scalars.append(TENSOR)
                key = id(a)
                if key in index and (found := index[key])[0] is a:
                    sources.append(found[2])
                    a = found[1]
                elif (birth := births.get(key)) is not None and birth[1]() is a:
                    sources.append(KNOWN - birth[0])
                    self.reads(a)
                else:
                    a = self._meet(a)
                    if sources[-1] < 0:
                        self.odd = True
            elif a.__class__ in NUMBERS:
                self._scalars.append(a)
            else:
                a = self.swap(a)
            swapped.append(a)
        return swapped

    def resolve(self, t: Tensor) -> Tensor:
        """The stand-in of a foreign tensor, anything made here as it is."""
        found = self._index.get(key := id(t))
        if found is not None and found[0] is t:
            self._sources.append(found[2])
            return found[1]
        if (birth := self._births.get(key)) is not None and birth[1]() is t:
            self._sources.append(KNOWN - birth[0])
            self.reads(t)
            return t
        met = self._meet(t)
        if self._sources[-1] < 0:
            self.odd = True
        return met

    def _meet(self, t: Tensor) -> Tensor:
        if (
            self._captures_leaves
            and type(t) in PLAIN
            and t.requires_grad
            and t.grad_fn is None
            and unwrap_once_if_dead(t) is t
            and peek_interpreter_stack() is None
            and id(t) not in self.leaves
            and (self.ledger is None or not self._computed_here(t))
        ):
            return self._capture_leaf(t)  # a parameter, nearly always
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
        untaped = (in_engine or self._returning) and not requires_grad_anywhere(t)
        if untaped and (in_engine or not self._was_there(t)):
            # A gradient that the engine handed out: made here, though nobody saw it.
            # A result that no tape knows may be passed on as it is, whoever made it, but for
            # forward mode: it may have a tangent, which is gone when its level has ended.
            if not in_engine:
                self.handed_on = {**self.handed_on, id(t): t}
            self._sources.append(MADE_HERE)
            return t
        # (A plain leaf that was made unseen gets its gradient as a capture does.)
        let_be = not t.requires_grad or _torch.is_wrapped(t)
        if let_be and not nodes_of([t]) and self._computed_here(t):
            self.remember(t)
            self._sources.append(MADE_HERE)
            return t
        if not self._lift_constants and not tracked(t):
            value = self._from_outside(t)
            if tracked(value):
                # What knew it has ended; in the replay around this region, a stand-in is it.
                return self._capture(t, value)
            position = self._register("constant", len(region.constants), t, value)
            holders = None if self.ledger is None else Holders(value, t)
            region.constants.append(Constant(value, holders))
            self._sources.append(position)
            return value
        if self._made_here(t, in_engine):
            self.remember(t)
            self._sources.append(MADE_HERE)
            return t
        return self._capture(t, self._from_outside(t))

    def _computed_here(self, t: Tensor) -> bool:
        """Whether the body was seen computing what is in its memory."""
        return False

    def _was_there(self, t: Tensor) -> bool:
        """Whether ``t``, of a level of forward mode, was made before the body began."""
        return False

    def _capture(self, t: Tensor, value: Tensor) -> Tensor:
        """Make a foreign tensor an input, by what it is for the region around this one."""
        return self._stand_in(t, self._lift(_torch.unwrap_if_dead(value)))

    def _stand_in(self, t: Tensor, standin: Tensor) -> Tensor:
        """``standin``, which from now on is ``t`` here: the input that was captured last."""
        position = self._register("capture", len(self._region.captured) - 1, t, standin)
        self._sources.append(position)
        return standin

    def _capture_leaf(self, t: Tensor) -> Tensor:
        """`_stand_in` and `_admit`, of what has no levels to be taken through."""
        captured, position = self._region.captured, len(self.origins)
        self.origins.append(("capture", len(captured)))
        captured.append(t)
        standin = self._region.frames[0].admit_one(t)
        if self.ledger is not None:
            self.holders.append(Holders(standin, t))
        self._originals.append(t)
        self._standins.append(standin)
        self._index[id(t)] = t, standin, position
        self._index[id(standin)] = standin, standin, position
        self._sources.append(position)
        return standin

    def _admit(self, t: Tensor) -> Tensor:
        """`_lift`, where there is but plain autograd."""
        self._region.captured.append(t)
        standin = self._region.frames[0].admit_one(t)
        if self.ledger is not None:
            self.holders.append(Holders(standin, t))
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
        if is_lazy(t):
            raise not_initialized(self._region.options.name)
        outer = self._region.outer
        if outer is None:
            return t
        # At the levels of the outer region: ours are gone when its stand-in is still used.
        with self._region.outer_levels(), watching(False):
            (origin,) = outer.operands(nested_capture, [t])
        return origin

    def _meet_wrapper(self, t: Tensor) -> Tensor:
        """A wrapper of a transform inside the region: what it wraps may be foreign."""
        self.looks = True
        source = MADE_HERE
        # (Asked before `inner` is a name for it.)
        nameless = anonymous_below(t, self._depth)
        inner = below(t, self._depth)
        if not nameless:
            self.resolve(inner)
            source = self._sources.pop()
        if source < 0 or self._standins[source] is inner:
            self.remember(t)
            self._sources.append(MADE_HERE)
            return t
        if t.requires_grad:
            raise RematError(
                f"remat: inside the region {self._region.options.name!r}, something differentiates "
                f"with respect to a tensor of shape {tuple(t.shape)} that the region closes over, "
                "in a way functx can't see. Use functx's transforms there, or pass the tensor to "
                "the region as an argument."
            )
        # Where several tensors are one in the forward, that is handed on as it is there.
        names = self.aliases.get(id(inner), ())
        known = any(self._standins[source] is name for name in names)
        self._sources.append(MADE_HERE if known else REWRAPPED - source)
        return rewrap(t, self._depth, self._standins[source])

    def _at_base(self) -> bool:
        """Whether there is but plain autograd: a graph being traced has a frame of its own."""
        frames = self._region.frames
        return len(frames) == 1 and hasattr(frames[0], "admit_one")

    def _lift(self, t: Tensor) -> Tensor:
        """Make ``t`` an input of the region while it runs."""
        if self._at_base() and _torch.peek_interpreter_stack() is None:
            return self._admit(t)
        region = self._region
        region.captured.append(t)
        if nodes_of([t]) and not of_ended_level(t):
            self._lasting.append(t)
        values = [t]
        # It may be met first where the body has grad mode off.
        with watching(False), torch.enable_grad():
            for frame in reversed(region.frames):
                values = frame.capture(values)
            for frame in region.frames:
                values = frame.admit(values)
        (standin,) = values
        if self.ledger is not None:
            self.holders.append(Holders(standin, t))
        return standin

    def check_captures(self) -> None:
        """The run ended, and its levels: what it captured must have been there before.

        Otherwise it was made here, of what is on the tape of an outer level: where nobody saw it.
        """
        for t in self._lasting:
            if of_ended_level(t):
                refuse_unseen(self._region.options.name, t)
        for t in self.leaves.values():
            if t.is_leaf and t.grad is not None:
                raise RematError(
                    f"remat: inside the region {self._region.options.name!r}, something calls "
                    f".backward(), which accumulates the gradient of a tensor of shape "
                    f"{tuple(t.shape)} that the region did not make; it would be lost. Take it by "
                    "torch.autograd.grad or functx.grad, or call .backward() outside of the region."
                )

    def _register(self, kind: str, number: int, original: Tensor, standin: Tensor) -> int:
        position = len(self.origins)
        self.origins.append((kind, number))
        self._originals.append(original)
        self._standins.append(standin)
        self._index[id(original)] = (original, standin, position)
        if standin is not original:
            self._index[id(standin)] = (standin, standin, position)
        for name in self.aliases.get(id(original), ()):
            self._index[id(name)] = (name, standin, position)
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
                # Another thread numbers nodes itself.
                older = (one.grad_fn for one in self._originals)
                return node is not None and value is t and leads_to(node, self.leaves, older)
            value = _torch.get_unwrapped(value)

    def given_for(self, leaf: Tensor) -> Tensor | None:
        """The input that a leaf of a throw-away tape stands for."""
        frames = self._region.frames
        if (known := sum(len(frame.leaves) for frame in frames)) != self._given[0]:
            pairs = (pair for f in frames for pair in zip(f.leaves, (*f.inputs, *f.captured)))
            self._given = known, dict(pairs)
        return self._given[1].get(id(leaf))

    def around(self) -> Any:
        """The tracker of the region around this one."""
        return self._region.outer

    def met(self) -> Met:
        """What the body captured and was given."""
        return met_as(self._originals, self.origins)

    def handed_back(self, out: Tensor) -> Tensor | tuple[Tensor, Tensor] | None:
        """The foreign tensor that ``out`` stands for; or that it is a view of, and ``out``."""
        found = self._index.get(id(out))
        if found is not None:
            return self._originals[found[2]]
        base = _torch.view_base(out)
        found = None if base is None else self._index.get(id(base))
        if found is None:
            return None
        kind, number = self.origins[found[2]]
        # As the region around this one knows it: the view is made there.
        captured = self._region.captured[number] if kind == "capture" else None
        return self._originals[found[2]] if captured is None else captured, out
