"""Scripts: what one run of a region tells about its replays and about later runs.

NOTE [two speeds]
The first run of a region is *recorded*: a function mode writes down its calls, and a dispatch mode
below it what runs on which memory. That is slow, and tells what a replay may leave out. It leaves a
script. A later run that is given inputs of the same kinds *follows* the script (`follow`): each
call is compared with the script before it is made, and nothing is written down.

Where a call departs, the run is recorded from there on, and leaves a script of its own, whose first
calls are those of the other one; of these its replay leaves none out. So a branch that a function
takes now and then costs one recorded run, and is followed afterwards, too. (Once such a script has
been followed from start to end, the next run is recorded as a whole, and its replays leave out all
that they may.)

A script decides on time alone. Each call is compared in the forward and in the replay; that nobody
reads what a script leaves out is checked in the replay (NOTE [leaving out]).

Regions whose calls do not tell all have a script that only their own replay reads: those in which
something draws, writes or pulls back beside the calls, which hand tensors out otherwise than by
return, or which call transforms or custom Functions inside.

NOTE [nests]
A call of a script may be a region inside. That region has scripts of its own. While the one around
follows, it must follow the script whose log the script around has; so its captures, its draws and
its results are those that the script around has, too. If there is no such script, or if it departs,
the region around hands over *first*: its ledger must lie below that of the region inside. In a
replay, the log of the forward decides: no other script will do, and no other numbers.

A region that writes to memory of the region around is recorded at each call, with the one around.

NOTE [pullbacks]
The pullback of a region, where somebody differentiates it, is a region as well. Its code is the
engine's, and makes no calls: the engine is not seen by modes. So its script says only which of its
inputs come back as gradients, and which operations its own replay runs. It hangs on the script of
the region that is pulled back, by which gradients of which results are asked for. If a hook makes a
call after all, nothing can begin to listen while the engine runs (it puts the modes back that it
has found): the pullback starts over, and is recorded.
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

_FOLLOWED = {RETURN, DATA, NAMED, CAPTURE}  # calls of no function that a follower knows


class Step(NamedTuple):
    """A call of a script, as a follower compares it."""

    func: Any
    grad: bool
    given: list[Any]
    is_flat: bool  # its arguments are tensors and plain values, one an entry of `given`
    is_plain: bool  # is flat, returns one new tensor, and does no more
    result: Any  # number, shape and dtype of the first result; ``None`` if there is none
    call: Call


# What a follower expects once it expects nothing more: no call matches it.
NO_STEP = Step(None, True, [], False, False, None, Call("nothing", []))


class Partly(enum.Enum):
    """Whether a script began with the calls of another one, where a run had departed from that."""

    NO = enum.auto()  # it was recorded from the first call on
    YES = enum.auto()
    # It was followed from start to end since, so the next run is recorded from its first call on.
    AND_FOLLOWED = enum.auto()


class Script:
    """What one run has told."""

    __slots__ = (
        *("before", "calls", "has_leaves_asked", "key", "kinds", "made", "nodes", "partly"),
        *("places", "pullbacks", "ran", "requiring", "results", "serial", "slots", "steps"),
        *("stop", "untold"),
    )
    partly: Partly  # whether it began with the calls of another script
    key: Any  # of runs that may follow it; see `forward`
    calls: list[Call]  # the log
    # For each call how many came before it, those of regions inside too; ``None`` without these.
    before: Sequence[int] | None
    stop: int  # the call before which the ledger of a replay begins to listen
    # By which gradients of which results they pull back, the scripts of this region's pullbacks:
    pullbacks: dict[Any, Scripts]
    steps: Sequence[Step]  # the same for a follower; empty where the calls do not tell all
    untold: str  # what they do not tell, for observers
    # Whether `torch.autograd.grad` was asked for a leaf that it was given; see `node`.
    has_leaves_asked: bool
    kinds: list[Any]  # of its inputs
    made: Any  # the inputs that were made of data, inside: their memory is the region's own
    results: list[int]  # which results of the body are different ones,
    places: list[int]  # and for each result which of these it is
    ran: Ran  # the operations, and which of them a replay runs
    serial: int  # the last number of a result
    nodes: int  # how many nodes autograd has made
    slots: list[Any]  # as `Inputs.slots`, which are those of all runs that follow it
    # At each level, the values that require grad there, and that the results depend on:
    requiring: list[list[int]]


def untold_in(calls: list[Call], is_pullback: bool) -> str:
    """What a later run can't follow in such calls; nothing if it can.

    In a pullback the engine makes tensors that no mode sees: in each run the same ones.
    """
    if is_pullback and len(calls) > 1:
        return "a hook, or a backward of the user's"
    for call in calls:
        if call.func == process_patches.APPLY:
            return "a custom Function"
        if call.inner is not None:
            if call.writes:
                return "a write in a region inside"
            if call.further:
                return "a result that leaves a region inside otherwise than by return"
        elif isinstance(call.func, str) and call.func not in _FOLLOWED:
            return "a transform inside"
        if OUTSIDE in call.given or (INSIDE in call.given and not is_pullback):
            return "an operand that no call has made"
        if any(type(shape) is tuple for _, shape, _ in call.results):
            return "a nested tensor"
    return ""


def step_of(call: Call) -> Step:
    """A call, as a follower compares it."""
    result = call.results[0] if call.results else None
    is_flat = call.is_flat and INSIDE not in call.given
    return Step(call.func, call.grad, call.given, is_flat, call.is_plain, result, call)


_MANY = 1000  # scripts that are found by what their function is
_ENOUGH = 8  # scripts of one region


class Scripts:
    """The scripts of one region. The one that was followed last comes first.

    A region may have no script that fits, such as one of a closure that is made at each call. Then
    it takes those of other regions of the same function: of one code, which closes over the same.
    A copy in a pickle is empty.
    """

    def __init__(self) -> None:
        self.own: list[Script] = []

    def __reduce__(self) -> Any:
        return Scripts, ()

    def fitting(self, key: Any, f: Any) -> list[Script]:
        """The scripts that a run of ``f`` with arguments of these kinds may follow, best first."""
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
        """The script that has this very log, which a run in a replay must make."""
        return next((s for s in self.fitting(key, f) if s.calls is log), None)

    def add(self, script: Script, f: Any) -> None:
        """A run has left a script."""
        if self is not OF_NO_REGION:
            self.own = [script, *self.own][:_ENOUGH]
        if f is not None and (identity := identity_of(f)) is not None:
            found = _of_code.pop(id(identity[0]), [])
            _of_code[id(identity[0])] = [(identity, script), *found][: 4 * _ENOUGH]
            while sum(map(len, _of_code.values())) > _MANY:
                _of_code.popitem(last=False)  # to which nothing was added for the longest time

    def followed(self, script: Script) -> None:
        """A run has followed a script to its end, which is not the first one here."""
        if self is not OF_NO_REGION:
            self.own = [script, *(s for s in self.own if s is not script)][:_ENOUGH]


OF_NO_REGION = Scripts()  # for calls such as `functx.checkpoint(f, x)`, which make a region each
# By the id of a function's code, which the identities hold, so that the id stays what it is.
_of_code: OrderedDict[int, list[tuple[Any, Script]]] = OrderedDict()


def identity_of(f: Any) -> Any:
    """What tells a function from others; it holds no tensor and no object of the program's.

    Its code, and what it closes over or is a method of, but for tensors and floating point numbers.
    ``None`` where nothing tells: it closes over a list, say.
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
    elif kind is tuple and not is_plain(x):  # of tensors, say
        parts.append(len(x))
        for inner in x:
            _identify(inner, parts, seen)
    else:
        parts.append(_part(x))


def _part(x: Any) -> Any:
    """What an object is in an identity."""
    kind = type(x)
    if kind is float or issubclass(kind, Tensor):
        return kind
    if (type(kind) is type and kind in ATOMS) or (kind is tuple and is_plain(x)):
        return kind, x
    return _reference(x)


def _reference(x: Any) -> Any:
    """A weak reference as a part of an identity; ``None`` where there can't be one."""
    if is_of(x, (list, tuple, dict, set, frozenset)):  # ``__hash__`` of a class may load its items
        return None
    try:
        hash(x)
        return ref(x)
    except Exception:  # ``__hash__`` of a class may raise any error
        return None
