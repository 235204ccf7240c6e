"""The listener of a forward: foreign tensors become inputs (NOTE [by place] in calls.py).

NOTE [inside or foreign]
The one decision on which values hang, made in `Captures.meet` and nowhere else. A tensor that is
neither an input nor a result is

1. a wrapper of one of those, of a level that has ended or was entered inside: that one;
2. in memory that the region's operations made: inside;
3. on a tape that leads to a stand-in: inside (what ``Function.apply`` returns);
4. else foreign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._remat import departures, distributed, examples, levels
from functx._remat.calls import INSIDE, Call, Listener, same_others
from functx._remat.functions import READERS
from functx._remat.ledger import Record
from functx._remat.operators import storage_of, tensors_in
from functx._remat.region import Inputs

_REQUIRES = {Tensor.requires_grad_, Tensor.requires_grad.__set__}
# Pulls back what it is given, with the closures of that.
_ENGINE = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


class Captures(Listener):
    """Listens to a forward.

    Attributes:
        captured: by the id of a foreign tensor, the number of the input that it became.
        asked: savers, of regions around too, whose policies look at operations.
        unseen: whether something may have passed by unseen, so that the tape must be looked at.
        leavers: results that require grad: weakly, their number, the call that made them.
    """

    def __init__(
        self,
        region: Any,
        inputs: Inputs,
        record: Record,
        outer: Listener | None,
        expected: list[Call] | None,
    ) -> None:
        super().__init__(record, outer, expected)
        self.region, self.inputs, self.record = region, inputs, record
        self.standins = inputs.standins
        savers = [ledger.saver for ledger in self.ledgers if ledger.saver is not None]
        self.asked = [saver for saver in savers if saver.asks]
        self.captured: dict[int, int] = {}
        self.held: list[Tensor] = []  # so that ids stay what they are
        self.made: set[int] = set()  # inputs that are made of data
        self.constants: list[int] = []  # inputs that nobody differentiates
        self.unseen = False
        self.leavers: dict[int, tuple[Any, int, Call]] = {}
        self.first_node = self.sequence = _torch.next_sequence_number()

    def depth(self) -> int:
        return len(self.inputs.frames)

    def admit(self, t: Tensor) -> int:
        """A further input; returns its number."""
        number = len(self.standins)
        standin = self.inputs.admit(t)
        if self.number_of(standin) is None:
            self.know(standin, -1 - number)
        if not levels.is_tracked(standin):
            self.constants.append(number)
        self.record.outside.update(self.inputs.memory[number])
        return number

    def meet(self, t: Tensor, number: int | None, due: int | None) -> tuple[int, Tensor]:
        if (placed := self.placed(t, number, due)) is not None:
            return placed
        if number is None:
            number = self.number_within(t)
        if number is not None and due != -1 - len(self.standins):
            return number, t
        value = levels.alive(t)
        if due == INSIDE or (due is None and self._is_inside(value)):
            return INSIDE, t
        if _torch.level_of(value) > self.depth():
            if not levels.is_tracked(value):
                return INSIDE, t  # a constant: nothing is lost
            raise departures.refused(
                f"{self.region.title} gives a captured tensor of shape {tuple(value.shape)} to a "
                "transform of torch.func, where functx can't put a stand-in for it. Use the "
                "transform of functx of the same name, or pass the tensor as an argument."
            )
        captured = self.captured.get(id(t))
        if captured is None or due is not None:
            self.held.append(t)
            if self.outer is not None:
                (value,) = self.outer.take("a capture of a region inside", [value])
            captured = self.captured[id(t)] = self.admit(levels.alive(value))
        return -1 - captured, self.standins[captured]

    def _is_inside(self, t: Tensor) -> bool:
        """See NOTE [inside or foreign]."""
        if self.record.has_made(storage_of(levels.base_of(t))):
            return True
        return levels.is_tracked(t) and self._leads_inside(t)

    def _leads_inside(self, t: Tensor) -> bool:
        leaves = self.inputs.leaves
        for node in tape_of(t, self.first_node):
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaves.get(id(leaf)) is leaf:
                return True
        return False

    def begin(self, call: Call) -> None:
        if self.sequence != _torch.next_sequence_number():
            self.unseen = True
        if self.expected is not None:
            expected = self.due()
            differs = (
                expected is None
                or not same_function(expected.func, call.func)
                or expected.operands != call.operands
                or (self.strict and not same_others(expected.others, call.others))
            )
            if differs:
                raise departures.differently(self.region, call, expected)
        if self.record.written:
            self.record.written.clear()

    def execute(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _SPECIAL:
            self._special(call, func, args, kwargs)
        if self.asked:
            examples.expect(self.asked, func, args, kwargs)
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            if _WRITES_A_LEAF not in str(error):
                raise
            raise departures.written(self.region.title, args) from error
        if self.record.written:
            self._check_written()
        return out

    def _special(self, call: Call, func: Any, args: Any, kwargs: Any) -> None:
        if func in READERS:
            self.record.need(storage_of(levels.base_of(args[0])))
        elif func in _ENGINE:
            self.unseen = True
            if any(map(self._is_given, tensors_in(args[:1], None))):
                raise departures.refused(
                    f"{self.region.title} pulls back something that was computed outside, whose "
                    "tape holds tensors that can't be seen. Compute it inside, or pull it back "
                    "outside."
                )
        elif func is _LABEL:
            distributed.check(args[0], self.region.title)
        elif isinstance(t := args[0], Tensor) and self._is_given(t):
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if func in _REQUIRES and wanted != t.requires_grad:
                raise departures.refused(
                    f"{self.region.title} changes requires_grad of a tensor that it did not make, "
                    f"of shape {tuple(t.shape)}. Do it outside of the region."
                )

    def hang(self, t: Tensor) -> None:
        number = self.number_of(t)
        if number is None:
            number, _ = self.meet(t, None, None)
        if number < 0 and -1 - number not in self.made:
            raise departures.refused(
                f"{self.region.title} hangs a hook on a tensor that it did not make, of shape "
                f"{tuple(t.shape)}, or asks for its gradient (retain_grad): a replay would not. Do "
                "it outside of the region."
            )

    def _is_given(self, t: Tensor) -> bool:
        """Whether it is an input itself, no wrapper of it, and not made of data inside."""
        number = self.number_of(t)
        return number is not None and number < 0 and -1 - number not in self.made

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor made of data, here or in a region inside: kept, as an input (rule 3)."""
        t = make() if self.outer is None else self.outer.keep(make)
        while _torch.level_of(t) > self.depth():
            t = _torch.inner_of(t)
        call = Call("a tensor of data", [], [])
        self.begin(call)
        number = call.kept = self.admit(t)
        self.made.add(number)
        self.held.append(t)
        self.end(call)
        return self.standins[number]

    def _check_written(self) -> None:
        """A call has written to inputs: no history may have got into them (rule 4)."""
        for number in self.constants:
            if number not in self.made and levels.is_tracked(self.standins[number]):
                self._refuse_history(self.standins[number])

    def _refuse_history(self, standin: Tensor) -> None:
        shape = tuple(standin.shape)
        if not standin._is_view():
            standin.detach_()
        raise departures.refused(
            f"{self.region.title} writes a value that requires grad into a tensor of shape {shape} "
            "that it did not make; its gradient would be lost. Write its detach(), or return the "
            "value."
        )

    def end(self, call: Call) -> None:
        if self.expected is not None and self.strict:
            expected = self.expected[len(self.calls)]
            if expected.results != call.results:
                raise departures.differently(self.region, call, expected)
        super().end(call)

    def finish(self) -> None:
        """The region's code has returned."""
        if self.sequence != _torch.next_sequence_number():
            self.unseen = True
        if self.expected is not None and len(self.calls) < len(self.expected):
            raise departures.differently(self.region, None, self.expected[len(self.calls)])

    def may_leave(self, known: tuple[Any, int], call: Call) -> None:
        super().may_leave(known, call)
        if known[1] > 0 or -1 - known[1] in self.made:
            self.leavers[id(known[0])] = *known, call

    def expects_inside(self) -> list[Call] | None:
        """What the log of a region inside, which has just been taken in, must be."""
        return None if self.expected is None else self.expected[len(self.calls) - 1].inner


# Torch's error: a stand-in is a leaf where what it is for may be none.
_WRITES_A_LEAF = "is being used in an in-place operation"
_LABEL = torch.ops.profiler._record_function_enter_new
_SPECIAL = {*READERS, *_ENGINE, *_REQUIRES, _LABEL}


def same_function(one: Any, other: Any) -> bool:
    """Whether two calls are of one function; of functions made anew each time, of one code."""
    if one is other or one == other:
        return True
    code = getattr(one, "__code__", None)
    return code is not None and code is getattr(other, "__code__", None)


def tape_of(t: Tensor, first: int) -> Any:
    """The nodes on the tapes of ``t``, at all levels, that are not older than ``first``.

    Leaves' nodes are among them; older nodes are given, but not followed.
    """
    todo: list[Any] = []
    while True:
        if t.requires_grad:  # (so says a view made under no_grad at a functorch level, too)
            todo.append(t.grad_fn)
        if _torch.level_of(t) <= 0:
            break
        t = _torch.inner_of(t)
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if hasattr(node, "variable") or node._sequence_nr() >= first:
            todo += [n for n, _ in node.next_functions]
