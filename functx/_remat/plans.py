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

from typing import Any

from torch import Tensor

from functx import _torch
from functx._remat.calls import DATA, INSIDE, NAMED, RETURN, Call, same_call
from functx._remat.region import Inputs, Region

CAPTURE = "a capture of a region inside"
_MANY = 1000
# Whether one of these draws or writes does not depend on the numbers that it is given.
_METHODS = (type(Tensor.add), type(Tensor.__add__))


class Plan:
    """What one run has told."""

    __slots__ = ("calls", "entries", "inputs", "left_out", "live", "nodes", "serial", "starts")

    def __init__(self, captures: Any, region: Region) -> None:
        self.calls, self.serial, self.nodes = captures.calls, captures.serial, captures.nodes
        self.inputs = captures.inputs.kinds
        self.entries, self.starts = region.entries, region.starts
        self.live, self.left_out = region.live, region.left_out

    def has_input(self, number: int, inputs: Inputs) -> bool:
        """Whether an input is of the kind that it was."""
        return number < len(self.inputs) and self.inputs[number] == inputs.kinds[number]


known: dict[Any, Plan | None] = {}  # by key; ``None`` where a run has departed


def key_of(region: Region, inputs: Inputs) -> Any:
    """What a plan is found by: the function and the kinds of its arguments; ``None`` for none."""
    if _torch.dispatch_depth() and _torch.tracing():
        return None
    options = region.options
    return (
        *(region.identity, options.early_stop, options.preserve_rng_state),
        *(tuple([frame.kind_and_size() for frame in region.frames]), tuple(inputs.kinds)),
    )


def make(captures: Any, region: Region, leaves: list[Tensor]) -> Plan | None:
    """The plan that a recorded run leaves, if its calls tell all."""
    key = captures.key
    if key is None or key in known or captures.hides or leaves or region.further:
        return None
    for call in captures.calls:
        unknown = isinstance(call.func, str) and call.func not in (RETURN, DATA, NAMED, CAPTURE)
        if INSIDE in call.given or call.further or (unknown and not (call.inner and call.inner[1])):
            return None
    if len(known) >= _MANY:
        known.clear()
    plan = known[key] = Plan(captures, region)
    return plan


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
