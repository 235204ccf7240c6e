"""Scripts: the record of one run of a region, which its replays and later runs follow.

NOTE [two speeds]
The first run of a region is *recorded*. A function mode logs its calls. Below it, a dispatch mode
records which operation uses which memory. This is slow, and it finds the operations that a replay
may leave out. The recorded run leaves a script. A later run with inputs of the same kinds *follows*
the script (`follow`): each call is compared with the script before it is made, and nothing is
recorded.

If a call departs from the script, the rest of the run is recorded. It leaves a new script, whose
first calls are those of the old one. A replay of the new script leaves none of these first calls
out. So a branch that a function takes now and then costs one recorded run, and later runs follow
it. (When a run has followed such a script from start to end, the next run is recorded as a whole.
The replays of that run leave out all operations that they may.)

A script affects only time. Each call is compared in the forward and in the replay. The replay
checks that the results of operations which the script leaves out are not read (NOTE [leaving out]).

Some regions have effects that their calls do not show: draws, writes or pullbacks outside of the
calls, tensors that leave without being returned, and transforms or custom Functions inside. The
script of such a run serves the replays of that run only, and the next run is recorded again.

NOTE [nests]
A call in a script may be a region inside, which has scripts, too. While the enclosing region
follows its script, that script has a log for the inner region. The inner region must follow the
script with this very log. Then its captures, its draws and its results are those that the enclosing
script expects. Suppose that no script has this log, or that the inner region departs from its
script. Then the enclosing region hands over *first*, because its ledger must lie below that of the
inner region. In a replay, the inner region must match the log of the forward: it may not use
another script or other numbers.

A region that writes to memory of its enclosing region is recorded at each call, and so is the
enclosing region.

NOTE [pullbacks]
The pullback of a region is a region as well, if it is differentiated. Its code is that of the
engine and makes no calls, because modes do not see the engine. So its script says only which of its
results are inputs, and which operations its own replay runs. It does not say on which inputs the
results depend: a hook that makes no call may decide that in each run. The script of the region has
a table of such scripts. The key says for which results there are cotangents, and for which inputs
gradients are asked.

A hook may make a call after all. No mode can begin to listen while the engine is running, because
the engine restores the modes that it has found. In this case the pullback starts over, and is
recorded.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from functx._core import is_of
from functx._remat.calls import ATOMS, CAPTURE, DATA, INSIDE, NAMED, OUTSIDE, RETURN, Call, is_plain
from functx._remat.cells import Wrapper
from functx._remat.ledger import Ran
from functx._torch import process_patches

_FOLLOWED = {RETURN, DATA, NAMED, CAPTURE}  # titles of calls, other than functions, to follow


class Step(NamedTuple):
    """A call of a script, in the form that a follower compares."""

    func: Any
    grad: bool
    given: list[Any]
    is_flat: bool  # each argument is one entry of `given`: a tensor or a plain value
    is_plain: bool  # it is flat, returns one new tensor, and has no other effect
    result: Any  # number, shape and dtype of the first result; ``None`` without results
    call: Call


# A step that no call matches. A follower expects it while it expects no call.
NO_STEP = Step(None, True, [], False, False, None, Call("nothing", []))


class Partly(enum.Enum):
    """Whether the run of a script has followed another script first, and then departed from it."""

    NO = enum.auto()  # the run was recorded from its first call on
    YES = enum.auto()
    # Yes, and a run has followed this script from start to end. So the next run is recorded.
    AND_FOLLOWED = enum.auto()


class Script:
    """The record of one run."""

    __slots__ = (
        *("before", "calls", "has_leaves_asked", "key", "kinds", "made", "nodes", "partly"),
        *("places", "pullbacks", "ran", "requiring", "results", "serial", "slots", "steps"),
        *("stop", "untold"),
    )
    partly: Partly  # whether its first calls are those of another script
    key: Any  # a run needs an equal key to follow this script; see `forward.key_of`
    calls: list[Call]  # the log
    # For each call the number of calls before it, with those of regions inside. ``None`` if no
    # region runs inside.
    before: Sequence[int] | None
    stop: int  # the ledger of a replay begins to listen before this call
    # The scripts of this region's pullbacks, by the results that have cotangents and the inputs
    # whose gradients are asked for:
    pullbacks: dict[Any, Scripts]
    steps: Sequence[Step]  # the calls for a follower; empty if the run had effects not in the log
    untold: str  # a description of such effects, for observers
    # Whether `torch.autograd.grad` has asked for a leaf that is an input; see `node`.
    has_leaves_asked: bool
    kinds: list[Any]  # the kinds of its inputs
    made: Any  # inputs that were made inside, of data: their memory belongs to the region
    results: list[int]  # the positions of the distinct results of the body,
    places: list[int]  # and for each result of the body its index among these
    ran: Ran  # the operations, and which of them a replay runs
    serial: int  # the number of the last result
    nodes: int  # the number of nodes that autograd has made
    slots: list[Any]  # as `Inputs.slots`, which are equal for all runs that follow this script
    # For each level, the values that require grad there and that the results depend on:
    requiring: list[list[int]]


def untold_in(calls: list[Call], is_pullback: bool) -> str:
    """A description of the call that a later run can't follow; empty if it can follow all.

    In a pullback the engine makes tensors that no mode sees. They are the same in each run.
    """
    if is_pullback and len(calls) > 1:
        return "a hook, or a backward of user code"
    for call in calls:
        if call.func == process_patches.APPLY:
            return "a custom Function"
        if call.inner is not None:
            if call.writes:
                return "a write in a region inside"
            if call.further:
                return "a tensor that leaves a region inside without being returned"
        elif isinstance(call.func, str) and call.func not in _FOLLOWED:
            return "a transform inside"
        if OUTSIDE in call.given or (INSIDE in call.given and not is_pullback):
            return "an operand that was not made by a call"
        if any(type(shape) is tuple for _, shape, _ in call.results):
            return "a nested tensor"
    return ""


def step_of(call: Call) -> Step:
    """A call, in the form that a follower compares."""
    result = call.results[0] if call.results else None
    is_flat = call.is_flat and INSIDE not in call.given
    return Step(call.func, call.grad, call.given, is_flat, call.is_plain, result, call)


_MANY = 1000  # the most scripts to hold in `_of_code`
_ENOUGH = 8  # the most scripts to hold for one region


class Scripts:
    """The scripts of one region. The one that was followed last comes first.

    A region may have no script that fits. For example, a closure may be made at each call. Such a
    region uses the scripts of other regions of the same function, that is, a function with the same
    code that closes over the same values. A pickled copy is empty.
    """

    def __init__(self) -> None:
        self.own: list[Script] = []

    def __reduce__(self) -> Any:
        return Scripts, ()

    def fitting(self, key: Any, f: Any) -> list[Script]:
        """The scripts that a run of ``f`` with this key may follow, best first."""
        own = [script for script in self.own if script.key == key]
        if own or not _of_code or f is None or (identity := identity_of(f)) is None:
            return own
        found = _of_code.get(id(identity[0]), ())
        return [s for other, s in found if s.key == key and _are_equal(other, identity)]

    def first_fitting(self, key: Any, f: Any) -> Script | None:
        """The first of what `fitting` returns; ``None`` if it returns none."""
        for script in self.own:
            if script.key == key:
                return script
        return next(iter(self.fitting(key, f)), None) if _of_code else None

    def with_log(self, key: Any, f: Any, log: list[Call]) -> Script | None:
        """The script with this very log, which a run inside of a replay must make."""
        return next((s for s in self.fitting(key, f) if s.calls is log), None)

    def add(self, script: Script, f: Any) -> None:
        """Add the script of a recorded run."""
        if self is not OF_NO_REGION:
            self.own = [script, *self.own][:_ENOUGH]
        if f is not None and (identity := identity_of(f)) is not None:
            found = _of_code.pop(id(identity[0]), [])
            _of_code[id(identity[0])] = [(identity, script), *found][: 4 * _ENOUGH]
            while sum(map(len, _of_code.values())) > _MANY:
                _of_code.popitem(last=False)  # drop the code that was updated the longest ago

    def followed(self, script: Script) -> None:
        """Move a script to the front: a run has followed it to its end."""
        if self is not OF_NO_REGION:
            self.own = [script, *(s for s in self.own if s is not script)][:_ENOUGH]


# For calls such as `functx.checkpoint(f, x)`, each of which makes a region:
OF_NO_REGION = Scripts()
# By the id of a function's code. The identities hold the code, so that the id stays unique.
_of_code: OrderedDict[int, list[tuple[Any, Script]]] = OrderedDict()


def identity_of(f: Any) -> Any:
    """A value that is equal for equal functions. It holds no tensor and no object of user code.

    It consists of the code, the closed-over values, and the object that a method belongs to, but
    leaves out the values of tensors and floating point numbers. It is ``None`` if functx can't
    identify the function, for example because it closes over a list.
    """
    parts: list[Any] = []
    _identify(f, parts, set())
    return None if None in parts else tuple(parts)


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # ``__eq__`` of an object in the closure may raise any error
        return False


def _identify(x: Any, parts: list[Any], seen: set[int]) -> None:
    kind = type(x)
    if kind is types.FunctionType:
        parts.append(x.__code__)
        if id(x) in seen:
            return
        seen.add(id(x))
        for given in (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()):
            _identify(given, parts, seen)
        for cell in x.__closure__ or ():
            try:
                _identify(cell.cell_contents, parts, seen)
            except ValueError:  # not bound yet
                parts.append(None)
    elif kind is functools.partial:
        for inner in (x.func, *x.args, *x.keywords, *x.keywords.values()):
            _identify(inner, parts, seen)
    elif kind is types.MethodType:
        _identify(x.__func__, parts, seen)
        parts.append(_reference(x.__self__))
    elif issubclass(kind, Wrapper):
        _identify(x.function, parts, seen)
    elif kind is types.BuiltinFunctionType:  # a function of C, or a method: ``x.mul`` holds ``x``
        parts += x.__qualname__, _part(x.__self__)
    elif kind is tuple and not is_plain(x):  # for example a tuple of tensors
        parts.append(len(x))
        for inner in x:
            _identify(inner, parts, seen)
    else:
        parts.append(_part(x))


def _part(x: Any) -> Any:
    """The part of an identity that stands for one object."""
    kind = type(x)
    if kind is float or issubclass(kind, Tensor):
        return kind
    if (type(kind) is type and kind in ATOMS) or (kind is tuple and is_plain(x)):
        return kind, x
    return _reference(x)


def _reference(x: Any) -> Any:
    """A weak reference as a part of an identity; ``None`` if the object allows none."""
    if is_of(x, (list, tuple, dict, set, frozenset)):  # ``__hash__`` of a class may load its items
        return None
    try:
        hash(x)
        return ref(x)
    except Exception:  # ``__hash__`` of a class may raise any error
        return None
