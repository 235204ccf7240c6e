"""Scripts: what one run of a region tells about its replays and about later runs.

NOTE [two speeds]
The first run of a region is *recorded*: a function mode writes down its calls, and a dispatch mode
below it what runs on which memory. That is slow, and tells what a replay may leave out. It leaves a
script. A later run that is given inputs of the same kinds *follows* the script (`follow`): each call
is compared with the script before it is made, and nothing is written down. Where a call departs, the
run is recorded from there on, and leaves a script of its own, whose first calls are those of the
other one; of these its replay leaves none out. So a branch that a function takes now and then costs
one recorded run, and is followed afterwards, too.

A script decides on time alone. Each call is compared in the forward and in the replay; that nobody
reads what a script leaves out is checked in the replay (NOTE [leaving out]).

Regions whose calls do not tell all have a script that only their own replay reads: those in which
something draws, writes or pulls back beside the calls, which hand tensors out otherwise than by
return, or which call regions and transforms inside.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from functx._remat.calls import DATA, INSIDE, NAMED, RETURN, Call
from functx._remat.ledger import Ran

_FOLLOWED = {RETURN, DATA, NAMED}  # calls of no function that a follower knows


class Step(NamedTuple):
    """A call of a script, as a follower compares it."""

    func: Any
    grad: bool
    given: list[Any]
    is_plain: bool  # given tensors and plain values, it returns one new tensor, and does no more
    result: Any  # number, shape and dtype of the first result; ``None`` if there is none
    call: Call


class Script:
    """What one run has told; it is only read."""

    __slots__ = (
        *("calls", "key", "kinds", "made", "nodes", "places", "ran", "reached", "results"),
        *("serial", "steps"),
    )
    key: Any  # of runs that may follow it; see `forward`
    calls: list[Call]  # the log
    steps: list[Step] | None  # the same for a follower; ``None`` where the calls do not tell all
    kinds: list[Any]  # of its inputs
    made: Any  # the inputs that were made of data, inside: their memory is the region's own
    results: list[int]  # which results of the body are different ones,
    places: list[int]  # and for each result which of these it is
    ran: Ran  # the operations, and which of them a replay runs
    serial: int  # the last number of a result
    nodes: int  # how many nodes autograd has made
    reached: Any  # the inputs that the results depend on, as `Inputs.reached`


def tell_all(calls: list[Call]) -> bool:
    """Whether a later run can follow such calls."""
    for call in calls:
        if isinstance(call.func, str) and call.func not in _FOLLOWED:
            return False
        if INSIDE in call.given or call.further:
            return False
    return True


def step_of(call: Call) -> Step:
    """A call, as a follower compares it."""
    result = call.results[0] if call.results else None
    return Step(call.func, call.grad, call.given, call.is_plain, result, call)


_MANY = 1000  # scripts that are found by the code of their function
_ENOUGH = 8  # scripts of one region


class Scripts:
    """The scripts of one region, that which was followed last first; a copy in a pickle has none."""

    def __init__(self) -> None:
        self.own: list[Script] = []

    def __reduce__(self) -> Any:
        return Scripts, ()

    def fitting(self, key: Any, code: Any) -> Iterator[Script]:
        """Scripts of runs with such arguments: the region's own first, then others of its code."""
        for script in self.own:
            if script.key == key:
                yield script
        known = _of_code.get(id(code))
        for script in known[1] if known is not None else ():
            if script.key == key:
                yield script

    def put_first(self, script: Script, code: Any) -> None:
        """A run has followed a script, or left it."""
        if self is not OF_CODE and not (self.own and self.own[0] is script):
            self.own = [script, *(s for s in self.own if s is not script)][:_ENOUGH]
        if code is None:
            return
        held, others = _of_code.get(id(code), (code, []))
        if others and others[0] is script:
            return
        is_new = script not in others
        _of_code[id(code)] = held, [script, *(s for s in others if s is not script)][: _ENOUGH * 4]
        if is_new:
            _of_code.move_to_end(id(code))
            while sum(len(scripts) for _, scripts in _of_code.values()) > _MANY:
                _of_code.popitem(last=False)


OF_CODE = Scripts()  # of a call that is of no region made before: those of its code
# By the id of what is called, which is held, so that the id stays what it is.
_of_code: OrderedDict[int, tuple[Any, list[Script]]] = OrderedDict()


def code_of(f: Any) -> Any:
    """What scripts of a function are found by, which holds no object of the program's.

    ``None`` where there is no such thing: a method of C's, ``x.mul``, holds its tensor.
    """
    kind = type(f)
    if kind is types.FunctionType:
        return f.__code__
    if kind is types.MethodType or kind is functools.partial:
        return code_of(f.__func__ if kind is types.MethodType else f.func)
    if kind is types.BuiltinFunctionType:
        return f if isinstance(f.__self__, (types.ModuleType, type, type(None))) else None
    if kind is types.MethodDescriptorType or kind is types.WrapperDescriptorType:
        return f
    return getattr(kind.__call__, "__code__", None) if not issubclass(kind, Tensor) else None
