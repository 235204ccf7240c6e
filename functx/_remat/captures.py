"""The listener of a forward: foreign tensors become inputs (NOTE [by place]).

NOTE [inside or foreign]
The one decision on which values hang, made in `Captures.meet` and nowhere else. A tensor that is
neither an input nor a result is

1. a wrapper of one of those, of a level that has ended or was entered inside: that one;
2. in memory that the region's operations made, or a view of a stand-in: inside;
3. on a tape that leads to a stand-in: inside (what ``Function.apply`` returns);
4. else foreign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from functx import _torch
from functx._core import BY_DEFINITION, NORMALISATIONS, RematError, mixes_dtypes, tree
from functx._remat import departures, examples, levels, sharding
from functx._remat.calls import CAPTURE, DATA, INSIDE, Call, is_simple
from functx._remat.ledger import Record, leave_out
from functx._remat.listener import Listener
from functx._remat.region import Inputs
from functx._torch.graphs import standin_of

# Change requires_grad of a tensor, to this unless they are told; or (`None`) its data.
_CHANGES: dict[Any, bool | None] = {Tensor.requires_grad_: True, Tensor.detach_: False}
_CHANGES |= {Tensor.requires_grad.__set__: True, Tensor.data.__set__: None}  # type: ignore[attr-defined]
# Pulls back what it is given, with the closures of that.
ENGINE = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


class Captures(Listener):
    """Listens to a forward."""

    plan: Any = None  # that a later run may follow; see `plans`
    plan_given: Any  # the one that the region around has for it

    def __init__(self, region: Any, inputs: Inputs, record: Record, outer: Listener | None) -> None:
        expected, self.plan_given = (None, None) if outer is None else outer.log_inside()
        ledgers = (record, *(() if outer is None else outer.ledgers))
        super().__init__(region, inputs.standins, ledgers, expected)
        self.outer, self.inputs, self.record = outer, inputs, record
        self.wanted = {} if outer is None else outer.wanted_inside()
        # Savers, of regions around too, whose policies look at operations:
        self.asked = [x.saver for x in ledgers if x.saver is not None and x.saver.asks]
        self.captured: dict[int, int] = {}  # by the id of a foreign tensor, its number as an input
        self.held: list[Tensor] = []  # so that ids stay what they are
        self.made: set[int] = set()  # inputs that are made of data
        self.constants: list[int] = []  # inputs that nobody differentiates
        self.unseen = False  # a custom Function, or a region inside, is on its tape
        self.first_node = _torch.next_sequence_number()

    def begin(self) -> None:
        """Listen to operations from now on, in regions around too."""
        if self.outer is not None:
            self.outer.record_around()
        self.ledgers = (self.record, *(() if self.outer is None else self.outer.ledgers))
        self.records = True
        _torch.push_dispatch_mode(self.record)

    def end(self) -> None:
        """The region's code has returned."""
        if self.records:
            _torch.pop_dispatch_mode(None)

    def let_go(self) -> None:
        """The region has run: who holds a stand-in now, is the program."""
        self.wanted |= {k: self.standins[-1 - k] for k in self.wanted if k < 0}
        self.standins.clear()
        self.inputs.leaves.clear()
        self.held.clear()

    def leaves_unseen(self, results: list[Tensor]) -> list[Tensor]:
        """Leaves on the tape that no mode has seen: they become inputs, asked for by themselves.

        Fused layers call ``Function.apply(x, self.weight)``, which no function mode is shown. On
        the way it is noted which inputs the results, at all levels, depend on.

        Raises:
            RematError: the tape leads to something else that was made outside.
        """
        found: dict[int, Tensor] = {}
        inputs, reached = self.inputs, set[Any](self.inputs.reached or ())
        for node in tape_of(results, self.first_node):
            if isinstance(node, BackwardCFunction):
                self.unseen = True
                for ledger in () if hasattr(node, "payload") else self.ledgers:
                    ledger.blind = True  # (no mode is told what a custom Function is given)
            leaf = getattr(node, "variable", None)
            if leaf is None:
                ours = node._sequence_nr() >= self.first_node
            else:
                ours = inputs.leaves.get(id(leaf)) is leaf or self.number_of(leaf) is not None
                reached.add(inputs.places.get(id(leaf)))
            if not ours and leaf is not None and _torch.level_of(leaf) <= 0:
                found[id(leaf)] = leaf
            elif not ours:
                raise RematError(
                    f"remat: {self.region.title} gives a captured tensor to an autograd.Function "
                    "or other code that can't be seen, or calls a pullback made outside; gradients "
                    "would be lost. Pass it as an argument, or make the pullback inside."
                )
        inputs.reached = reached - {None}
        return [*found.values()]

    def leave_out(self, results: list[Tensor]) -> None:
        """Find what a replay may leave out (rule 6)."""
        leave_out(self.region, self.record, results)

    # -- results

    def returned(self, out: Any, given: Any, operands: Any) -> Any:
        out = super().returned(out, given, operands)
        touched, self.record.touched = self.record.touched, False
        if self.records:
            call = self.last[0]
            call.watched = touched
            call.quick = (
                type(out) is Tensor
                and call.results[0][0] not in call.given
                and call.results[0][0] not in self.leaves
                and not (touched or call.func in _SPECIAL)
                and not (self.norms >= BY_DEFINITION and call.func in NORMALISATIONS)
                and not (self.norms and mixes_dtypes(call.func, operands))
                and len(call.given) == len(operands)
                and all(map(is_simple, operands))
            )
        return out

    def give(self, tensors: list[Tensor]) -> list[Tensor]:
        self.record.touched = False
        if self.last[1] is None:
            asleep, self.asleep = self.asleep, True
            tensors = [self._handed_through(t) for t in tensors]
            self.asleep = asleep
        return super().give(tensors)

    def _handed_through(self, t: Tensor) -> Tensor:
        """What a transform inside has returned: the stand-in, where it is of a foreign tensor."""
        value = levels.alive(t)
        if self.number_of(t) is not None or _torch.level_of(value) > self.depth:
            return t
        if not levels.is_tracked(value) or self._is_inside(value):
            return t
        return self.meet(t, None, None)[1]

    # -- inputs

    def admit(self, t: Tensor) -> int:
        """A further input; returns its number."""
        number = len(self.standins)
        standin = self.inputs.admit(t)
        if standin is not t or self.number_of(standin) is None:
            self.know(standin, -1 - number)
        if not levels.is_tracked(standin):
            self.constants.append(number)
        return number

    def meet(self, t: Tensor, number: int | None, due: Any) -> tuple[int, Tensor]:
        if (placed := self.placed(t, number, due)) is not None:
            return placed
        number = self.number_within(t) if number is None else number
        if number is not None and due != -1 - len(self.standins):
            return number, t
        value = levels.alive(t)
        if due == INSIDE or (due is None and self._is_inside(value)):
            return INSIDE, t
        if _torch.level_of(value) > self.depth:
            if not levels.is_tracked(value):
                return INSIDE, t  # a constant: nothing is lost
            raise departures.refused(
                f"{self.region.title} gives a captured tensor of shape {tuple(value.shape)} to a "
                "transform of torch.func. Use functx's of the same name, or pass it as an argument."
            )
        captured = self.captured.get(id(t))
        if captured is None or due is not None:
            captured = self.capture(t)
        return -1 - captured, self.standins[captured]

    def capture(self, t: Tensor) -> int:
        """A foreign tensor becomes an input; returns its number."""
        value = standin_of(levels.alive(t))
        self.held.append(t)
        if self.outer is not None:
            (value,) = self.outer.take(CAPTURE, [value])
        number = self.captured[id(t)] = self.admit(levels.alive(value))
        return number

    def _is_inside(self, t: Tensor) -> bool:
        """See NOTE [inside or foreign]."""
        base = levels.base_of(t)
        if self.record.has_made(_torch.storage_of(base)) or id(base._base) in self.inputs.leaves:
            return True  # (A view that was made without grad mode is on no tape.)
        if not levels.is_tracked(t):
            return False
        leaves = self.inputs.leaves
        on_tape = [getattr(node, "variable", None) for node in tape_of([t], self.first_node)]
        return any(leaf is not None and leaves.get(id(leaf)) is leaf for leaf in on_tape)

    # -- calls

    def execute(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _SPECIAL:
            self._special(call, func, args, kwargs)
        if self.asked:
            examples.expect(self.asked, func, args, kwargs)
        try:
            out = super().execute(call, func, args, kwargs)
        except RuntimeError as error:
            if _WRITES_A_LEAF not in str(error):
                raise
            raise departures.written(self.region.title, args) from error
        if self.record.written:
            self.record.written.clear()
            self._check_written()
        if func in ENGINE and any(t.grad is not None for t in self.inputs.leaves.values()):
            what = f"{self.region.title} calls backward(): gradients of its inputs would be lost"
            raise departures.refused(f"{what}. Use torch.autograd.grad, or call it outside.")
        return out

    def _special(self, call: Call, func: Any, args: Any, kwargs: Any) -> None:
        if func in ENGINE:
            if any(map(self._is_given, tree.leaves(args[:1]))):
                raise departures.refused(
                    f"{self.region.title} pulls back something that was computed outside, whose "
                    "tape can't be seen. Compute it inside, or pull it back outside."
                )
        elif func is _LABEL:
            sharding.check(args[0], self.region.title)
        elif isinstance(t := args[0], Tensor) and self._is_given(t):
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", _CHANGES[func])
            if _CHANGES[func] is None or wanted != t.requires_grad:
                raise departures.refused(
                    f"{self.region.title} changes requires_grad or data of a tensor that it did "
                    f"not make, of shape {tuple(t.shape)}. Do it outside of the region (if a hook "
                    "does it, put the region inside); what has no grad can be written with copy_()."
                )

    def hang(self, t: Tensor) -> None:
        number = self.number_of(t) or self.meet(t, None, None)[0]
        if number < 0 and -1 - number not in self.made:
            raise departures.refused(
                f"{self.region.title} hangs a hook on a tensor that it did not make, of shape "
                f"{tuple(t.shape)}, or asks for its gradient (retain_grad): a replay would not. Do "
                "it outside of the region."
            )

    def _is_given(self, t: Any) -> bool:
        """Whether it is an input itself, no wrapper of it, not made of data inside; or older."""
        if hasattr(t, "_sequence_nr"):  # a node, of an edge that is pulled back
            return bool(t._sequence_nr() < self.first_node)
        number = self.number_of(t)
        given = number is not None and number < 0 and -1 - number not in self.made
        return given and t is self.standins[-1 - number]  # type: ignore[operator]

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor made of data, here or in a region inside: kept, as an input (rule 3)."""
        t = make() if self.outer is None else self.outer.keep(make)
        while _torch.level_of(t) > self.depth:
            t = _torch.inner_of(t)
        self.record.made.pop(_torch.storage_of(t), None)
        call = Call(DATA, [])
        self.log(call)
        number = call.kept = self.admit(t)
        self.made.add(number)
        self.held.append(t)
        return self.standins[number]

    def _check_written(self) -> None:
        """A call has written to inputs: no history may have got into them (rule 4)."""
        for number in self.constants:
            standin = self.standins[number]
            if number in self.made or not levels.is_tracked(standin):
                continue
            if not standin._is_view():
                standin.detach_()
            raise departures.refused(
                f"{self.region.title} writes a value that requires grad into a tensor of shape "
                f"{tuple(standin.shape)} that it did not make; its gradient would be lost. Write "
                "its detach(), or return the value."
            )


# Torch's error: a stand-in is a leaf where what it is for may be none.
_WRITES_A_LEAF = "is being used in an in-place operation"
_LABEL = torch.ops.profiler._record_function_enter_new
_SPECIAL = {*ENGINE, *_CHANGES, _LABEL}


def tape_of(tensors: list[Tensor], first: int) -> Any:
    """The nodes on the tapes of tensors, at all levels, that are not older than ``first``.

    Leaves' nodes are among them; older nodes are given, but not followed.
    """
    todo: list[Any] = []
    for t in tensors:
        todo.append(t.grad_fn)
        while _torch.level_of(t) > 0:
            t = _torch.inner_of(t)
            todo.append(t.grad_fn)
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if hasattr(node, "variable") or node._sequence_nr() >= first:
            todo += [n for n, _ in node.next_functions]
