"""Plans: what the first run of a region tells about later ones.

NOTE [listen once]
The dispatch mode of a forward is its largest cost. It is there to tell what a replay may leave out,
and to see draws and writes. So the first run of a region is recorded, and leaves a plan. Later runs
that are given inputs of the same kinds compare each call with the plan before they make it, and
record but the calls that drew or wrote. From the first difference on a run is recorded again, its
replay leaves nothing out, and its function follows no plan any more. That nobody reads what a plan
leaves out is checked in the replay (NOTE [leaving out]): a wrong plan costs time, never a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functx import _torch
from functx._remat import departures
from functx._remat.calls import CAPTURE, DATA, INSIDE, NAMED, RETURN, Call, same_call
from functx._remat.captures import ENGINE, Captures
from functx._remat.ledger import Ran, Record, ledgers
from functx._remat.region import Inputs, Region

_MANY = 1000
_TOLD = {RETURN, DATA, NAMED, CAPTURE}  # calls of no function that are compared whole
# Whether one of these draws or writes does not depend on the numbers that it is given.
_METHODS = (type(Tensor.add), type(Tensor.__add__))


class ReplayPlan(NamedTuple):
    """What one run has told."""

    calls: list[Call]
    inputs: list[Any]  # their kinds
    ran: Ran
    serial: int  # the last number of a result
    nodes: int  # how many autograd has made
    unseen: bool  # whether leaves may be on the tape that no mode sees
    reached: Any  # the inputs that the results depend on


known: dict[Any, ReplayPlan | None] = {}  # by key; ``None`` where a run has departed


def key_of(region: Region, inputs: Inputs) -> Any:
    """What a plan is found by: the function and the kinds of its arguments; ``None`` for none."""
    if _torch.dispatch_depth() and _torch.tracing():
        return None
    options = region.options
    return (
        *(region.identity, options.early_stop, options.preserve_rng_state, region.settings.norms),
        *(tuple([(f.kind, f.size, f.randomness) for f in region.frames]), tuple(inputs.kinds)),
    )


class Follower(Captures):
    """A listener that follows the plan of an earlier run, or leaves one."""

    def begin(self) -> None:
        self.key = key_of(self.region, self.inputs)
        self.plan = self.plan_given if self.expected is not None else self.known_plan()
        self.may_depart = False  # the log that is expected is the plan's
        self.departed = False  # from the plan
        self.hides = False  # it ran, drew or wrote beside its calls, or in a mode: nothing tells
        self.modes = _modes_entered()
        if self.plan is None:
            super().begin()
            return
        self.ledgers, self.serial = self.ledgers[1:], self.plan.serial
        if self.expected is None:
            self.may_depart = True
            self.expect(self.plan.calls)

    def known_plan(self) -> ReplayPlan | None:
        """The plan of an earlier run, if there is one."""
        try:
            return known.get(self.key)
        except Exception:  # ``__eq__`` of an object in the closure may raise any error
            self.key = None
            return None

    def record_around(self) -> None:
        if not self.records:
            self.depart()

    def depart(self) -> None:
        """Follow the plan no more (see NOTE [listen once])."""
        if _modes_entered() != self.modes:
            raise departures.refused(
                f"{self.region.title} makes other calls than in its last run, in a dispatch mode "
                "that it has entered. Enter the mode outside of the region."
            )
        if self.may_depart:
            self.may_depart = False
            self.expect(None)
            known[self.key] = None
        self.plan = None
        self.departed = bool(self.calls)  # else nothing has been missed
        super().begin()

    def leaves_unseen(self, results: list[Tensor]) -> list[Tensor]:
        self.nodes, plan = _torch.next_sequence_number() - self.first_node, self.plan
        if plan is None or plan.unseen or plan.nodes != self.nodes:
            return super().leaves_unseen(results)
        self.inputs.reached = plan.reached
        return []

    def leave_out(self, results: list[Tensor]) -> None:
        if self.plan is not None:
            self.region.ran = self.plan.ran
        elif self.departed:
            self.region.ran = Ran(self.record.entries, self.record.starts)
        else:
            super().leave_out(results)

    def make_plan(self, leaves: list[Tensor]) -> None:
        """Leave a plan, if the calls of this run tell all."""
        hidden = self.hides or leaves or self.region.further
        if self.plan is not None or self.key is None or self.key in known or hidden:
            return
        for call in self.calls:
            inside = isinstance(call.func, str) and call.func not in _TOLD
            unknown = inside and not (call.inner and call.inner[1])
            if unknown or INSIDE in call.given or call.further:
                return
        if len(known) >= _MANY:
            known.clear()
        told = self.calls, self.inputs.kinds, self.region.ran, self.serial, self.nodes
        self.plan = known[self.key] = ReplayPlan(*told, self.unseen, self.inputs.reached)

    # -- calls

    def matches(self, call: Call, due: Call) -> bool:
        return is_alike(call, due) if self.may_depart else super().matches(call, due)

    def departs(self, call: Call, due: Call | None) -> None:
        if not self.may_depart:
            super().departs(call, due)
        self.depart()

    def differs(self, call: Call, due: Call) -> None:
        if self.may_depart or self.strict:
            self.departs(call, due)

    def log(self, call: Call) -> Call | None:
        in_a_mode = self.records and _modes_entered() != self.modes
        self.hides = self.hides or self.record.touched or in_a_mode
        due = super().log(call)
        if due is not None:
            call.quick, call.watched, call.kept = due.quick, due.watched, due.kept
        return due

    def log_inside(self) -> tuple[Any, Any]:
        return (None, None) if self.may_depart else super().log_inside()

    def execute(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        self.hides = self.hides or func in ENGINE
        if self.records or not call.watched:
            return super().execute(call, func, args, kwargs)
        depth = _torch.dispatch_depth()
        try:
            for record in self.not_recording():
                _torch.push_dispatch_mode(record)
            return super().execute(call, func, args, kwargs)
        finally:
            while _torch.dispatch_depth() > depth:  # (see NOTE [guard])
                _torch.pop_dispatch_mode(None)

    def not_recording(self) -> list[Record]:
        """The ledgers, of regions around too, that see nothing; outermost first."""
        around = self.outer.not_recording() if isinstance(self.outer, Follower) else []
        return around if self.records else [*around, self.record]

    # -- inputs

    def standin_for(self, t: Tensor, number: int) -> Tensor | None:
        captured = self.captured.get(id(t))
        new = captured is None and self.may_depart and -1 - number == len(self.standins)
        if new and t.grad_fn is None and _torch.level_of(t) <= 0:
            captured = self.capture(t)
        return self.standins[captured] if captured == -1 - number and self.expected else None

    def meet(self, t: Tensor, number: int | None, due: Any) -> tuple[int, Tensor]:
        return super().meet(t, number, None if self.may_depart else due)

    def capture(self, t: Tensor) -> int:
        number = super().capture(t)
        if self.may_depart and self.plan.inputs[number : number + 1] != [self.inputs.kinds[number]]:
            self.depart()
        return number


def _modes_entered() -> int:
    """How many dispatch modes there are that are no ledgers."""
    depth = _torch.dispatch_depth()
    return depth and depth - len(ledgers())


def is_alike(call: Call, due: Call) -> bool:
    """Whether a call is one that the plan has, but perhaps for numbers."""
    if same_call(call, due, True):
        return True
    if type(call.func) not in _METHODS or not same_call(call, due, False):
        return False
    return len(call.given) == len(due.given) and all(map(_differ_in_number, call.given, due.given))


def _differ_in_number(one: Any, other: Any) -> bool:
    if one == other:
        return True
    if type(one) is not tuple or type(other) is not tuple:
        return False
    return type(one[0]) in (int, float) and type(other[0]) is type(one[0])
