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

import functools
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor

from functx import _torch
from functx._remat.calls import ATOMS, DATA, INSIDE, RETURN, Call, same_call
from functx._remat.cells import Wrapper
from functx._remat.region import Inputs, Region

CAPTURE = "a capture of a region inside"
_MANY = 1000
# Whether one of these draws or writes does not depend on the numbers that it is given.
_METHODS = (type(Tensor.add), type(Tensor.__add__))


class Plan:
    """What one run has told.

    Attributes:
        calls: the log.
        entries, starts, live, left_out: of the ledger, see `Region`.
        inputs: their kinds.
        nodes: how many nodes of autograd's the run has made.
        serial: the last number that a result has.
    """

    __slots__ = ("calls", "entries", "inputs", "left_out", "live", "nodes", "serial", "starts")

    def __init__(self, captures: Any, region: Region) -> None:
        self.calls, self.serial, self.nodes = captures.calls, captures.serial, captures.nodes
        self.inputs = captures.inputs.kinds
        self.entries, self.starts = region.entries, region.starts
        self.live, self.left_out = region.live, region.left_out

    def has_input(self, number: int, inputs: Inputs) -> bool:
        """Whether an input is of the kind that it was."""
        return number < len(self.inputs) and self.inputs[number] == inputs.kinds[number]


_plans: dict[Any, Plan | None] = {}


def identity_of(f: Any, around: tuple[Any, ...] = ()) -> Any:
    """What tells a function from others that make other calls; ``None`` if it can't be told.

    Its code, and what it closes over or is a method of, but for tensors and floating point numbers.
    """
    kind = type(f)
    if kind is FunctionType:
        if f in around:  # it closes over itself
            return (f.__code__,)
        try:
            contents = [cell.cell_contents for cell in f.__closure__ or ()]
        except ValueError:  # not bound yet
            return None
        contents += [*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]
        return _all([f.__code__, *(_in_cell(c, (*around, f)) for c in contents)])
    if kind is MethodType:
        return _all([identity_of(f.__func__, around), _reference(f.__self__)])
    if kind is functools.partial:
        given = [*f.args, *f.keywords.values()]
        return _all([identity_of(f.func, around), *(_in_cell(c, around) for c in given)])
    if isinstance(f, Wrapper):
        return identity_of(f.function, around)
    return _all([f if kind is BuiltinFunctionType else _reference(f)])


def _all(parts: list[Any]) -> Any:
    return None if None in parts else tuple(parts)


def _in_cell(content: Any, around: tuple[Any, ...]) -> Any:
    if isinstance(content, Tensor):
        return Tensor
    if type(content) is float:
        return float
    return (content,) if type(content) in ATOMS else identity_of(content, around)


def _reference(x: Any) -> Any:
    """An object as a part of a key, not held; ``None`` for a list, say."""
    try:
        x = ref(x)
        hash(x)
    except TypeError:
        return None
    return x


def key_of(region: Region, inputs: Inputs) -> Any:
    """What a plan is found by: the function and the kinds of its arguments; ``None`` for none."""
    if _torch.dispatch_depth() and _torch.tracing():
        return None
    options = region.options
    return (
        *(region.identity, options.early_stop, options.preserve_rng_state),
        *(tuple([frame.kind_and_size() for frame in region.frames]), tuple(inputs.kinds)),
    )


def find(key: Any) -> Plan | None:
    """The plan of a key."""
    return _plans.get(key)


def make(captures: Any, region: Region) -> Plan | None:
    """The plan that a recorded run leaves, if its calls tell all."""
    key = captures.key
    if key is None or key in _plans or captures.unseen or region.further:
        return None
    for call in captures.calls:
        unknown = isinstance(call.func, str) and call.func not in (RETURN, DATA, CAPTURE)
        if INSIDE in call.given or call.further or (unknown and not (call.inner and call.inner[1])):
            return None
    if len(_plans) >= _MANY:
        _plans.clear()
    plan = _plans[key] = Plan(captures, region)
    return plan


def forget(key: Any) -> None:
    """A run has departed from the plan: none is followed any more."""
    _plans[key] = None


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
