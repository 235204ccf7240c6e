"""A forward that follows a script, until a call departs from it."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from functx import _torch
from functx._remat import departures, levels
from functx._remat.calls import Call, same_call
from functx._remat.captures import Captures
from functx._remat.follow import Differs, Follower
from functx._remat.ledger import Record
from functx._remat.region import Inputs, Region
from functx._remat.script import Script
from functx._remat.writes import Writes, check_written

# Whether one of these draws or writes does not depend on the numbers that it is given.
_METHODS = (type(Tensor.add), type(Tensor.__add__))


class ForwardFollower(Follower):
    """Follows a script in a forward; the recorder takes over where a call departs."""

    def __init__(
        self, region: Region, inputs: Inputs, scripts: list[Script], first_node: int
    ) -> None:
        super().__init__(region, scripts[0], inputs.standins)
        self.inputs, self.kinds, self.first_node = inputs, scripts[0].kinds, first_node
        self.others = scripts[1:]  # which may be tried where a call departs
        self.follows_whole = True  # the script, from its first call on
        self.depth, self.modes = _torch.functorch_depth(), _torch.dispatch_depth()
        self.foreign: dict[int, Tensor] = {}  # by the number of an input, what was captured
        self.changed: dict[int, Call] = {}  # calls with other numbers than those of the script
        self.record: Any = None  # a ledger for calls that write
        self.writes: Writes | None = None

    # -- inputs

    def standin_for(self, t: Tensor, number: int) -> Tensor:
        k, standins = -1 - number, self.standins
        if k != len(standins):
            if self.foreign.get(k) is not t:
                raise Differs
            return standins[k]
        if not self._is_foreign(t):
            raise Differs
        standin = self._admitted(levels.alive(t), k)
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
        call.results, call.is_plain = due.results, due.is_plain
        self.changed[self.at] = call
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
        while self.others:
            script = self.others.pop(0)
            if script.steps[:at] == self.steps[:at] and script.kinds[:n] == self.inputs.kinds:
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
        record = Record(self.region.draws)
        heir = self.heir = Captures(self.region, self.inputs, record, None, self.first_node)
        heir.take_over(self)
        if self.writes is None:
            self.writes = Writes(self.inputs, heir.made, self.region.title)
        record.writes = self.writes
        heir.begin()
        return heir

    def returns(self, results: list[Tensor]) -> list[Tensor] | None:
        found = super().returns(results)
        while found is None and self._another():
            found = super().returns(results)
        return found

    # -- the end

    def leaves_something(self, results: list[Tensor]) -> bool:
        """The region has run: whether the program holds something that requires grad."""
        inputs = self.inputs
        are_tracked = levels.is_tracked if inputs.frames else Tensor.requires_grad.__get__  # type: ignore[attr-defined]
        self.given = [ref(t) if are_tracked(t) else None for t in self.standins]
        self.standins.clear()
        inputs.leaves.clear()
        self.foreign.clear()
        returned = {id(t) for t in results}
        for known in (*self.given, *self.refs):
            if known is not None and (t := known()) is not None:
                if id(t) not in returned and levels.is_tracked(t):
                    return True
        return False


def _differ_in_number(one: Any, other: Any) -> bool:
    """Whether two arguments are the same, or numbers of one type."""
    if one == other:
        return True
    if type(one) is not tuple or type(other) is not tuple:
        return False
    return type(one[0]) in (int, float) and type(other[0]) is type(one[0])
