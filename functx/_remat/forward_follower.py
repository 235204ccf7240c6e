"""A forward that follows a script, until a call departs from it."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from functx import _torch
from functx._core import tree
from functx._remat import departures, leaving, levels, node
from functx._remat.calls import Call, same_call
from functx._remat.captures import Captures
from functx._remat.follow import Differs, Follower
from functx._remat.generators import Draws
from functx._remat.guard import StackGuard
from functx._remat.ledger import Record
from functx._remat.listener import Body
from functx._remat.region import Inputs, Region
from functx._remat.script import Partly, Script
from functx._remat.writes import Writes, check_written

# Whether one of these draws or writes does not depend on the numbers that it is given.
_METHODS = (type(Tensor.add), type(Tensor.__add__))


class ForwardFollower(Follower):
    """Follows a script in a forward; the recorder takes over where a call departs."""

    follows_whole = True  # the script, from its first call on
    changed: Any = MappingProxyType({})  # calls with other numbers than those of the script
    record: Any = None  # a ledger for calls that write
    writes: Writes | None = None
    leaves_grad_mode = True  # in which the region's code has left
    others: list[Script] | None = None  # which may be tried where a call departs

    def __init__(
        self,
        region: Region,
        inputs: Inputs,
        script: Script,
        function: Any,
        entry: StackGuard,
        first_node: int,
    ) -> None:
        # (What `Follower` has, too: this runs at each call.)
        self.region, self.n_args, self.norms = region, region.n_args, region.settings.norms
        self.script, self.steps, self.kinds = script, script.steps, script.kinds
        self.inputs, self.standins, self.function = inputs, inputs.standins, function
        self.refs, self.numbers = [None] * (script.serial + 1), {}
        self.depth, self.modes, self.first_node = entry.functorch, entry.dispatch, first_node
        self.foreign: dict[int, Tensor] = {}  # by the number of an input, what was captured

    def run(self, body: Body) -> tuple[Any, list[Tensor]]:
        """How the results were, and these, on their nodes.

        Where the run has departed from the script, and has an ``heir``, that goes on with what the
        region's code has returned.
        """
        _torch.push_function_mode(self)
        out = body(*self.standins)
        if torch.is_grad_enabled() is not True:
            # A region may return with grad mode switched off, as any function may. What it has
            # computed keeps its history, so the engine goes on in the mode of the call.
            self.leaves_grad_mode = False
            _torch.set_grad_enabled(True)
        out, how = ([out], None) if type(out) is Tensor else tree.partition(out)
        if self.heir is not None:
            return how, out
        results = self.returns(out)
        while results is None and self._another():
            results = self.returns(out)
        script, region, inputs = self.script, self.region, self.inputs
        nodes = _torch.next_sequence_number() - self.first_node - inputs.nodes
        if results is None or nodes != script.nodes:
            if results is not None:  # autograd knows of something else
                self.at -= 1
            self.hand_over()
            return how, out
        _torch.pop_function_mode()
        del out
        if len(script.results) < len(results):
            results[:] = [results[i] for i in script.results]
        if region.draws is not None:
            region.draws = region.draws.ended()
        region.script, region.slots, region.left_behind = script, inputs.slots, self.refs
        if self.changed:
            region.changed = self.changed
        if self.writes is not None and inputs.lowest <= len(inputs.frames):
            region.written = self.writes.inputs_written()
            self.writes.put_before()
        if script.partly is Partly.YES and self.follows_whole:
            script.partly = Partly.AND_FOLLOWED
        fresh = self.in_levels(results) if inputs.frames else self.at_the_base(results)
        if len(script.places) == len(fresh):
            return how, fresh
        return how, [fresh[i] for i in script.places]

    def at_the_base(self, results: list[Tensor]) -> list[Tensor]:
        """The results at the base level, on their node."""
        region, inputs = self.region, self.inputs
        if inputs.lowest:  # nobody differentiates them
            return results
        required, fresh = [], []
        for t in results:
            required.append(t.requires_grad and (t.grad_fn is not None or id(t) in inputs.leaves))
            fresh.append(levels.detached(t) if self.modes else t.detach())
        if True not in required:
            return fresh
        del t
        results.clear()
        n, requiring, leaves = len(fresh), self.script.requiring[0], list[Tensor]()
        if self.leaves_something(()):
            further = leaving.further_results(self._recorder_at_the_end(), leaves)
            region.further = [number for number, _ in further]
            region.leaves = [ref(t) for t in leaves]
            fresh += [t for _, t in further]
            required += [True] * len(further)
            requiring = inputs.requiring(0)  # what these depend on, nothing tells
        if not (requiring or leaves):
            return fresh
        args = region, 0, inputs, requiring, leaves, fresh, required
        return node.attach(*args, (), outermost=True)[:n]

    def in_levels(self, results: list[Tensor]) -> list[Tensor]:
        """The results, inside of transforms, on a node a level."""
        inputs, frames = self.inputs, self.inputs.frames
        n, lowest = len(frames), inputs.lowest
        if lowest > n:  # nobody differentiates them
            return results
        # (As in `Forward.finish`.)
        parts, slots = {n: results}, {}
        for k in range(n, lowest, -1):
            parts[k - 1], slots[k] = frames[k - 1].lower_all(parts[k], k)
        required = {k: node.required_of(parts[k], k, inputs) for k in range(lowest, n + 1)}
        fresh = [node.off_the_tape(t, lowest) for t in parts[lowest]]
        results.clear()
        parts.clear()
        for k in range(lowest, n + 1):
            if k > lowest:
                fresh = frames[k - 1].lift_all(fresh, slots[k], k)
            if True in required[k] and (requiring := self.script.requiring[k]):
                args = self.region, k, inputs, requiring, (), fresh, required[k]
                fresh = node.attach(*args, (), outermost=True)
        if self.leaves_something(fresh):
            leaving.check_nothing_left(self._recorder_at_the_end(), fresh)
        return fresh

    def _recorder_at_the_end(self) -> Captures:
        """What can say more of this run, which has followed its script to the end."""
        recorder = self.hand_over()
        recorder.end()
        self.heir = None
        return recorder

    # -- inputs

    def standin_for(self, t: Tensor, number: int) -> Tensor:
        k, standins = -1 - number, self.standins
        if k != len(standins):
            if self.foreign.get(k) is not t:
                raise Differs
            return standins[k]
        inputs = self.inputs
        if inputs.leaves.get(id(t)) is t:  # a stand-in: an argument where the script has a capture
            raise Differs
        if inputs.frames or t.grad_fn is not None or t._is_view():
            if any([t is s for s in standins]) or not self._is_foreign(t):
                raise Differs
            standin = self._admitted(levels.alive(t), k)
        else:  # a leaf or a constant, at the base level: the most frequent case
            kind = t.shape, t.dtype, t.device, t.requires_grad
            if len(self.kinds) <= k or kind != self.kinds[k] or self.is_result(t):
                raise Differs
            value = _torch.unwrap_if_dead(t)
            standin = inputs.admit(t if value is t else levels.alive(value))
        self.foreign[k] = t
        return standin

    def _is_foreign(self, t: Tensor) -> bool:
        """Whether ``t`` was made outside; what looks otherwise is left to the recorder."""
        if self.is_result(t):
            return False
        value = levels.alive(t)
        if _torch.level_of(value) > self.depth:
            return False
        while True:
            node = value.grad_fn
            if node is not None and node._sequence_nr() >= self.first_node:
                return False
            if _torch.level_of(value) <= 0:
                return not value._is_view() or id(value._base) not in self.inputs.leaves
            value = _torch.inner_of(value)

    def _admitted(self, value: Tensor, k: int) -> Tensor:
        """The stand-in of a further input, if it is of the kind that the script has."""
        inputs = self.inputs
        sizes = [len(values) for values in inputs.values]
        standin = inputs.admit(value)
        if len(self.kinds) <= k or inputs.kinds[k] != self.kinds[k]:
            inputs.take_back(sizes)
            raise Differs
        return standin

    def keep(self, make: Any, due: Call) -> Tensor:
        t = make()
        while _torch.level_of(t) > self.depth:
            t = _torch.inner_of(t)
        if due.kept != len(self.standins):
            return self.hand_over().keep(lambda: t)
        try:
            standin = self._admitted(t, due.kept)
        except Differs:  # of another shape, say
            return self.hand_over().keep(lambda: t)
        self.foreign[due.kept] = t
        self.advance()
        return standin

    # -- calls

    def accepts(self, call: Call, due: Call) -> bool:
        if same_call(call, due, True):
            return True
        if type(call.func) not in _METHODS or len(call.given) != len(due.given):
            return False
        if not all(map(_differ_in_number, call.given, due.given)):
            return False
        call.results, call.is_flat, call.is_plain = due.results, due.is_flat, due.is_plain
        self.changed = {**self.changed, self.at: call}
        return True

    def execute(self, due: Call, func: Any, args: Any, kwargs: Any) -> Any:
        draws = self.region.draws
        if due.draws and draws is not None:
            given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]
            for generator in given:
                draws.note(generator)
            if not given:
                draws.note_unseen()
        if not due.writes:
            return super().execute(due, func, args, kwargs)
        if self.record is None:
            self.record = Record(draws)
            self.writes = Writes(self.inputs, self.script.made, self.region.title)
            self.record.writes = self.writes
        constants = [i for i, t in enumerate(self.standins) if not levels.is_tracked(t)]
        depth = _torch.dispatch_depth()
        self.ledger = self.record
        try:
            _torch.push_dispatch_mode(self.record)
            out = super().execute(due, func, args, kwargs)
        finally:
            self.ledger = None
            while _torch.dispatch_depth() > depth:  # (see NOTE [guard])
                _torch.pop_dispatch_mode(None)
        if self.record.written:
            self.record.written.clear()
            check_written(self.standins, constants, self.script.made, self.region.title)
        return out

    def calls_made(self) -> list[Call]:
        calls = super().calls_made()
        for i, call in self.changed.items():
            calls[i] = call
        return calls

    # -- departures

    def departed(self, func: Any, args: Any, kwargs: Any) -> Any:
        while self._another():
            step = self.steps[self.at]
            if step.func is func or step.func == func:
                return self.__torch_function__(func, (), args, kwargs)
        return super().departed(func, args, kwargs)

    def _another(self) -> bool:
        """Whether there is another script that begins with the calls made so far: go on by that."""
        at, n = self.at, len(self.standins)
        if self.others is None:
            fitting = self.region.scripts.fitting(self.script.key, self.function)
            self.others = [script for script in fitting if script is not self.script]
        while self.others:
            script = self.others.pop(0)
            if script.steps[:at] == self.steps[:at] and script.kinds[:n] == self.inputs.kinds:
                if script.draws:
                    self._note_draws()
                self.script, self.steps, self.kinds = script, script.steps, script.kinds
                self.refs += [None] * (script.serial + 1 - len(self.refs))
                self.follows_whole = at == 0
                return True
        return False

    def hand_over(self) -> Captures:
        if _torch.dispatch_depth() != self.modes:
            raise departures.refused(
                f"{self.region.title} makes other calls than in its last run, in a dispatch mode "
                "that it has entered. Enter the mode outside of the region."
            )
        self._note_draws()
        record = Record(self.region.draws)
        heir = self.heir = Captures(self.region, self.inputs, record, None, self.first_node)
        heir.take_over(self)
        if self.writes is None:
            self.writes = Writes(self.inputs, heir.made, self.region.title)
        record.writes = self.writes
        heir.begin()
        return heir

    def _note_draws(self) -> None:
        """Random numbers may be drawn from here on; so far there are none."""
        region, preserved = self.region, self.region.options.preserve_rng_state
        if region.draws is None and preserved:
            region.draws = Draws(self.standins, python=preserved == "all")

    # -- the end

    def leaves_something(self, results: Sequence[Tensor]) -> bool:
        """The region has run: whether the program holds something that requires grad."""
        inputs = self.inputs
        self.given = given = list[Any]()
        for t in self.standins:
            given.append(ref(t) if t.requires_grad or inputs.frames else None)
        t = None
        self.standins.clear()
        inputs.leaves.clear()
        self.foreign.clear()
        for known in (*given, *self.refs):
            if known is not None and (t := known()) is not None:
                if levels.is_tracked(t) and not any([t is result for result in results]):
                    return True
        return False


def _differ_in_number(one: Any, other: Any) -> bool:
    """Whether two arguments are the same, or numbers of one type."""
    if one == other:
        return True
    if type(one) is not tuple or type(other) is not tuple:
        return False
    return type(one[0]) in (int, float) and type(other[0]) is type(one[0])
