"""Tensors that a body did not make, or that leave it: what it asks of their gradients by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functx import _torch, _torch_nodes
from functx._places import is_internal
from functx._remat._answers import EDGES, kept_answer, refuse_edges, refuse_otherwise, who_asks
from functx._remat._entry import Entry
from functx._remat._gradients import GRADIENTS, RETAIN_GRAD, refuse_if_lost, refuse_if_partial
from functx._remat._hung_at_ends import lasting, moved_outside, refuse_on_leaves
from functx._remat._hung_on_given import (
    HANGING,
    LEFT,
    gradient_refused,
    hang,
    hook_refused,
    hung_already,
)
from functx._remat._region import Region
from functx._remat._tapes import of_ended_level, tensors_of
from functx._remat._tracker import OBSERVERS, SILENT, Tracker, active_tracker, tracking
from functx._torch_nodes import ABOUT_ITS_TAPE, BASE, GRAD_FN, IS_LEAF, RETAINS


class AboutGradients(Tracker):
    """The part of the tracker of a first run that `_gradients` is about."""

    _region: Region
    _index: dict[int, tuple[Tensor, Tensor, int]]
    _originals: list[Tensor]
    _standins: list[Tensor]
    _depth: int
    _lift_constants: bool
    entries: list[Entry]
    origins: list[tuple[str, int]]
    _start: int
    # Whose gradients are to be retained: what is to ask for them, weakly or not.
    _retained: Sequence[Callable[[], Tensor | None]] = ()
    _hung: Sequence[Tensor] = ()  # what it did not make, and has hung hooks on
    _ends: Sequence[Any] = ()  # nodes of stand-ins
    _asked = 0  # for how many of these
    on_nodes: Sequence[Any] = ()  # the handles of hooks that it has hung on nodes
    leaves: dict[int, Tensor]

    def knows(self, t: Tensor) -> bool:
        """Whether ``t`` was seen being made in this run."""
        raise NotImplementedError

    def reads(self, t: Tensor) -> None:
        """An operation reads what was made in this run. ``NOTE [written unseen]``."""

    def given(self) -> Sequence[Tensor]:
        """What the body was given, or has captured so far."""
        return self._originals

    def hung(self, handle: Any) -> None:
        """For the regions around as well, whose replays run the body afresh."""
        super().hung(handle)
        if (outer := self._region.outer) is not None:
            outer.hung(handle)

    def has_hung(self, hooks: Any) -> bool:
        """As the regions around know it, which may be replays."""
        outer = self._region.outer
        return super().has_hung(hooks) or (outer is not None and outer.has_hung(hooks))

    def hung_on_a_node(self, handle: Any) -> None:
        """A body here, or in a region inside, has hung a hook on a node."""
        self.odd = True
        self.on_nodes = [*self.on_nodes, handle]
        if isinstance(outer := self._region.outer, AboutGradients):
            outer.hung_on_a_node(handle)

    def hold_ends(self) -> None:
        """A walk may begin: nodes that live without this run's tape live as long as the run."""
        if isinstance(outer := self._region.outer, AboutGradients):
            outer.hold_ends()
        known, self._asked = self._asked, len(self._standins)
        with tracking(SILENT):
            self._ends = [*self._ends, *lasting(self._stand_for(known))]

    def _stand_for(self, first: int) -> list[tuple[Tensor, Tensor]]:
        """What the body did not make, as regions around know it, each with its stand-in."""
        those = [*zip(self._originals, self.origins, self._standins)][first:]
        captured = self._region.captured
        return [(captured[n] if kind == "capture" else t, s) for t, (kind, n), s in those]

    def move_hooks(self, leaves: Sequence[Tensor]) -> None:
        """NOTE [hooks at the ends] in `_hung_at_ends`; the tape of this run ends in ``leaves``."""
        region = self._region
        with tracking(SILENT):
            moved = moved_outside(self.on_nodes, self._stand_for(0))
            region.ends = [*region.ends, *moved]
            own = [t for t in leaves if id(t) not in self.leaves]
            refuse_on_leaves(self.on_nodes, own, region.options.name)

    def hang(self, func: Any, t: Tensor, hook: Any) -> Any:
        """NOTE [hooks on what is given] in `_hung_on_given`."""
        name, found = self._region.options.name, self._index.get(id(t))
        node = None if found is None else found[1].grad_fn
        if found is not None and node and _torch.sequence_number(node) >= self._start:
            if found[1] is not t:
                raise hook_refused(t, name)
            return LEFT
        outside = t if of_ended_level(t) else self._outside(t)
        if outside is None:
            return LEFT
        self._hung = [*self._hung, outside]
        return hang(func, outside, hook, self._region.outer, name)

    def departs(self) -> None:
        """It is no longer as was expected."""

    def asked(self, func: Any, t: Tensor) -> Any:
        """NOTE [answers] in `_answers`."""
        file = who_asks()
        if func == GRAD_FN and (file == EDGES or not is_internal[file]):
            self.hold_ends()
        if not is_internal[file]:
            return self.answer(func, t)
        if func == IS_LEAF and (found := self._index.get(id(t))) is not None:
            with tracking(SILENT):
                original = self._outermost(t)
                refuse_otherwise(func, t, func(found[1]), func(original), self._region.options.name)
        return LEFT

    def answer(self, func: Any, t: Tensor) -> Any:
        """What it is told, and replays are."""
        options = self._region.options
        with tracking(SILENT):
            answer, outside = self._answer(func, t)
        if func == GRAD_FN and outside is None:
            return answer
        lenient = options.replay or options.by_sight or options.determinism_check == "none"
        if lenient or self._lift_constants:
            if outside is not None and (found := self._index.get(id(t))) is not None:
                with tracking(SILENT):
                    refuse_otherwise(func, t, func(found[1]), answer, options.name)
            return answer
        kept, told = kept_answer(func, answer, outside is not None)
        if isinstance(answer, Tensor):
            with tracking(SILENT):
                standin = self.resolve(answer)
            source = self._sources[-1]
            if source >= 0 and self.origins[source][0] == "input":
                answer = standin
        if told is not None:
            self.odd = True
            self.departs()
        self._scalars.append(kept)
        self.close(func)
        if told is not None:
            self.entries[-1].told = told
        return answer

    def _answer(self, func: Any, t: Tensor) -> tuple[Any, Tensor | None]:
        """The answer, and the tensor outside that it is about, if it is."""
        found, outer = self._index.get(id(t)), self._region.outer
        node = None if found is None else found[1].grad_fn
        written = node is not None and _torch.sequence_number(node) >= self._start
        outside = None if written else t if of_ended_level(t) else self._outside(t)
        if outside is None:
            answer = func(t)
            if func == BASE and answer is not None and id(answer) in self._index:
                root, _ = self._answer(func, answer)
                answer = answer if root is None else root
        elif outer is not None:
            answer = outer.answer(func, outside)
        else:
            answer = func(outside)
        if func == RETAINS and not (answer or t.is_leaf):
            those = (id(t), id(outside))
            answer = any(id(one()) in those for one in self._retained)
        return answer, outside

    def _outermost(self, t: Tensor) -> Tensor:
        """What a tensor is outside of all regions that know it as one of theirs."""
        tracker: Any = self
        while isinstance(tracker, AboutGradients) and (found := tracker._index.get(id(t))):
            t, tracker = tracker._originals[found[2]], tracker._region.outer
        return t

    def about_gradients(self, func: Any, args: Any) -> Any:
        """Ask the tensor that a stand-in stands for, or raise."""
        if func in ABOUT_ITS_TAPE:
            return self.asked(func, args[0])
        if func in HANGING:
            with tracking(SILENT):
                return self.hangs(func, args)
        if func is GRADIENTS:
            with tracking(SILENT):
                self._about_to_differentiate(*args[:2])
            return LEFT
        t = args[0]
        found = self._index.get(id(t))
        if func == RETAIN_GRAD:
            if _torch.interpreter_depth() or not t.requires_grad:
                with tracking(SILENT):
                    t.retain_grad()  # which torch refuses
            original = None if found is None else self._originals[found[2]]
            ask = weakref.ref(t) if original is None else lambda: original
            self._retained = [*self._retained, ask]
            return None
        if found is not None or not self.knows(t):
            with tracking(SILENT):
                refuse_if_lost(func, self._outermost(t), args, self._region.options.name)
        return LEFT

    def _about_to_differentiate(self, outputs: Any, inputs: Any) -> None:
        name = self._region.options.name
        edges = {(t.grad_fn, t.output_nr): t for t in self._originals if t.grad_fn is not None}
        refuse_edges((outputs, inputs), edges, name)
        outs = tensors_of(outputs)
        wanted = [t for t in map(self._outside, tensors_of(inputs)) if t is not None]
        for t in wanted:
            if any(t is one for one in self._hung):
                raise gradient_refused(t, name)
        if wanted:
            known = {id(found[0]): found[1] for found in self._index.values()}
            foreign = [(t, known.get(id(t), t)) for t in self._originals]
            foreign += [(t, t) for t in outs if self._outside(t) is t]
            outs = [known.get(id(t), t) for t in outs]
            refuse_if_partial(outs, wanted, foreign, name)

    def _outside(self, t: Tensor) -> Tensor | None:
        """What a tensor is outside of the region; ``None`` if that has made it."""
        found = self._index.get(id(t))
        if of_ended_level(t):
            return None  # an error by itself: `on_the_tape`
        if found is not None:
            return self._originals[found[2]]
        if self.knows(t) or (_torch.is_wrapped(t) and _torch.wrapper_level(t) > self._depth):
            return None
        node = t.grad_fn
        return t if node is None or _torch.sequence_number(node) < self._start else None

    def retained(self, outs: Sequence[Tensor | None]) -> list[int | Callable[[], Tensor | None]]:
        """Whose gradients are to be retained: results, by position, and what is held otherwise."""
        if not self._retained:
            return []
        those = {id(t): i for i, t in enumerate(outs) if t is not None}
        return [those.get(id(ref()), ref) for ref in self._retained]


def _hang_on_node(hooks: Any, hang: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """A hook is hung on a node, which may have some: the dict of them, and its handle."""
    tracker = active_tracker()
    if tracker is None:
        return hang()
    given = hooks is not None and tracker.has_hung(hooks)
    found = (hooks, hung_already(hooks)) if given else hang()
    tracker.hung(found[1])
    if isinstance(tracker, AboutGradients):
        tracker.hung_on_a_node(found[1])
    return found


OBSERVERS.append(lambda: _torch_nodes.observe_hooks_of_nodes(_hang_on_node))
