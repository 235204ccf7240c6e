"""A run that follows a script: each call is compared before it is made, and nothing is recorded.

The follower has a list of weak references to the tensors that the script numbers. So it finds out
with one comparison whether an operand is the expected one, where a recorder looks into a dict. At
the first call that departs from the script, the follower hands its stand-ins, references and calls
over to another listener, which goes on. In a forward this is the recorder (`captures`). In a replay
it is a listener that compares calls and raises errors (`replay`).

Code that runs at each operation, or at each call of a region, is written for speed. It has list
comprehensions where a generator would read better, and defaults on the class for attributes that
are rarely set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from functx import _torch
from functx._core import NORMALISATIONS, contents, is_of, normalised, tree, uncompiled
from functx._remat import departures, leaving, levels, node, saving
from functx._remat.calls import (
    ATOMS,
    CAPTURE,
    DATA,
    HOOKS,
    INSIDE,
    LOOKS,
    MAKERS,
    NAMED,
    READ,
    RETURN,
    Call,
    in_a_row,
    is_plain,
    listed,
    read_by,
    same_call,
    same_function,
)
from functx._remat.captures import Captures
from functx._remat.guard import StackGuard
from functx._remat.ledger import Record, read_outside
from functx._remat.listener import Body, Listener, Listening
from functx._remat.region import NEVER, Inputs, Region
from functx._remat.script import NO_STEP, Partly, Script, Step
from functx._remat.writes import Writes, check_written
from functx._torch import AUTOGRAD, FUNCTORCH_FRONT, key_excluded, peek_interpreter

# The types of functions whose draws and writes do not depend on numbers among their arguments.
_METHODS = (type(Tensor.add), type(Tensor.__add__))
_NO_CALLS = {*MAKERS, *HOOKS, saving.shown}


class Differs(Exception):
    """An operand is not the one in the script."""


class StartOver(BaseException):
    """A pullback made a call while the engine was running; see NOTE [pullbacks] in `script`."""


class Follower(TorchFunctionMode, Listening):
    """Compares the calls of a run with those of a script.

    For a region inside (NOTE [nests] in `script`) it also acts as a ledger, which is notified of
    each call of that region. The ledger of a recorded run counts those calls. So a follower counts
    them, too: if it hands over, the recorder goes on with the right number.
    """

    stop = NEVER  # the call at which a ledger begins to listen
    ledger: Any = None  # the ledger, if it has begun
    asleep = False  # whether the region's code has returned, or a region inside is running
    heir: Listener | None = None  # the listener that goes on after a call has departed
    at = 0  # the number of calls so far
    ledgers_around: tuple[Any, ...] = ()  # the ledgers of enclosing regions
    open = -1  # the position, in the script, of the call of the region inside; -1 for none
    calls_inside = 0  # how many calls that region has made since the last call of this one
    saver: Any = None  # (ledgers have this attribute)
    given: Sequence[Any] = ()  # weak references to the stand-ins, set when they are dropped
    # Inputs that a call has returned as other Python objects. For example, at a level
    # ``x.to(x.dtype)`` is a new wrapper. By the id of such an object, a weak reference to it and
    # the number of the input.
    returned_again: Mapping[int, Any] = MappingProxyType({})

    region: Region
    n_args: int
    norms: int
    due: Step  # the call that is expected next; `NO_STEP` if no call is expected
    depth: int  # the number of levels when the region began
    modes: int  # the number of dispatch modes when the region began
    script: Script
    steps: Sequence[Step]
    standins: list[Tensor]
    refs: list[Any]  # by number, weak references to the results of calls
    numbers: dict[int, int]  # by the id of a result, its number; the result may be gone

    # -- methods that differ between a forward and a replay

    def hand_over(self) -> Listener:
        """Hand over at a call that departs; returns the listener for this call and later ones."""
        raise NotImplementedError

    def standin_for(self, t: Tensor, number: int) -> Tensor:
        """The stand-in to use for ``t``, if input ``number`` is expected here."""
        raise NotImplementedError

    def keep_as(self, make: Any, due: Call) -> Tensor:
        """The tensor of data that the expected call ``due`` makes."""
        raise NotImplementedError

    def execute(self, due: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call that is not plain (see `Call.is_plain`)."""
        if func in READ:
            read_outside(read_by(func, args, kwargs))
        if self.norms and func in NORMALISATIONS:
            return normalised(func, args, kwargs, self.norms)
        return func(*args, **kwargs) if kwargs else func(*args)

    def hang_on_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Register a hook on a result."""
        return func(*args, **kwargs)

    def watch(self) -> None:
        """Let the ledger begin to listen, if it may: the call `stop` has come."""

    # -- methods that both share

    def listener(self) -> Listening:
        return self.heir or self

    def sleep(self) -> None:
        if self.heir is not None:
            self.heir.sleep()
        else:
            self.asleep, self.due = True, NO_STEP

    def wake(self) -> None:
        if self.heir is not None:
            self.heir.wake()
        else:
            self.asleep, self.due = False, self.steps[self.at]

    def hears(self) -> bool:
        """As `Listener.hears`."""
        if self.heir is not None:
            return bool(self.heir.hears())
        return not (
            self.asleep
            or key_excluded(AUTOGRAD)
            or (peek_interpreter() is not None and not _torch.key_included(FUNCTORCH_FRONT))
            or (self.ledger is not None and self.ledger.busy)
            # A dispatch mode from outside of the region handles an operation. Meanwhile it is not
            # on the stack.
            or _torch.dispatch_depth() < self.modes
        )

    # -- as the ledger of a region inside

    @property
    def ledgers(self) -> tuple[Any, ...]:  # type: ignore[override]
        return (self, *self.ledgers_around)

    @property
    def busy(self) -> bool:
        """As `Ledger.busy`."""
        return self.ledger is not None and bool(self.ledger.busy)

    def next_call(self) -> None:
        """Note that a call of a region inside begins."""
        self.calls_inside += 1
        if self.heir is not None:
            for ledger in self.heir.ledgers[:1]:  # (the region inside notifies the others itself)
                ledger.next_call()
        elif self.ledger is not None:
            self.ledger.next_call()

    def calls_before(self) -> int:
        """The number of calls so far, with those of regions inside."""
        before = self.script.before
        if before is None:
            return self.at
        if self.open >= 0:
            return before[self.at - 1] + 1 + self.calls_inside
        return before[self.at]

    # -- reports of transforms and of regions inside

    def take(self, title: Any, tensors: list[Any]) -> list[Any]:
        if self.heir is not None:
            return self.heir.take(title, tensors)
        step = self.steps[self.at]
        due, given = step.call, list[Any]()
        asleep, self.asleep, self.due = self.asleep, True, NO_STEP
        try:
            if step.func != title or step.grad is not torch.is_grad_enabled():
                raise Differs
            taken = [listed(t, given, self._place_in(due)) for t in tensors]
            if given != due.given:
                raise Differs
        except Differs:
            self.asleep = asleep
            return self.hand_over().take(title, tensors)
        self.asleep = asleep
        self.advance()
        self.calls_inside = 0
        if title != CAPTURE:
            self.open = self.at - 1
        return taken

    def resume(self, mark: int) -> None:
        self.open = mark

    def log_inside(self) -> list[Call] | None:
        return self.steps[self.open].call.inner

    def wanted_inside(self) -> dict[int, Tensor | None]:
        return {}  # (a run with further results leaves no script to follow)

    def note_inside(self, calls: list[Call]) -> None:
        """Do nothing: a replay has compared these calls already."""

    def give(self, tensors: list[Tensor]) -> list[Tensor]:
        results = self.steps[self.open].call.results
        if len(results) == len(tensors):
            new = []
            for t, (number, shape, dtype) in zip(tensors, results):
                if t.shape != shape or t.dtype is not dtype:
                    break
                if number < 0:
                    if -1 - number >= len(self.standins):
                        break
                    standin = self.standins[-1 - number]
                    memory = _torch.storage_of(levels.base_of(standin))
                    if t is not standin and _torch.storage_of(levels.base_of(t)) != memory:
                        break  # (a region inside returns an input as an alias, so memory decides)
                    t = standin
                elif not self._may_be(t, number):
                    break
                new.append(t)
            else:
                for t, (number, _, _) in zip(new, results):
                    if number > 0:
                        self.know(t, number)
                self.open = -1
                return new
        mark, heir = self.open, self.hand_over()
        heir.resume(mark)
        return heir.give(tensors)

    def hang(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.heir is None and self.is_result(args[0]):
            return self.hang_on_result(func, args, kwargs)
        return (self.heir or self.hand_over()).hang(func, args, kwargs)

    def keep(self, make: Any) -> Tensor:
        """A tensor that a region inside makes of data."""
        if self.heir is not None:
            return self.heir.keep(make)
        due = self.steps[self.at].call
        return self.keep_as(make, due) if due.func == DATA else self.hand_over().keep(make)

    def give_further(self, results: list[tuple[int, Tensor]]) -> None:
        """Do nothing: a forward has handed over already, and a replay does not use them."""

    # -- calls

    def calls_made(self) -> list[Call]:
        """The log so far."""
        calls = self.script.calls
        return calls if self.at == len(calls) else calls[: self.at]

    @uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # (This runs at each operation. So the common case comes first, with few steps.)
        due, grad, wanted, is_flat, is_plain, result, _ = step = self.due
        if (
            func is not due
            or not is_flat
            or grad is not torch.is_grad_enabled()
            or key_excluded(AUTOGRAD)
            or peek_interpreter() is not None
        ):
            if self.asleep or func in LOOKS or not self.hears():
                return func(*args, **kwargs) if kwargs else func(*args)
            if self.heir is not None:
                return self.heir.__torch_function__(func, types, args, kwargs)
            if func is not due or not is_flat or grad is not torch.is_grad_enabled():
                return self.other(step, func, args, kwargs or {})
        given = operands = args if not kwargs else in_a_row(args, kwargs)
        if len(given) != len(wanted):
            return self.other(step, func, args, kwargs or {})
        # (The same comparisons as in `operands`, for the case that no argument is replaced.)
        refs, standins = self.refs, self.standins
        for a, number in zip(given, wanted):
            if type(number) is int:
                if number > 0:
                    if (known := refs[number]) is not None and known() is a:
                        continue
                elif -number <= len(standins) and standins[-1 - number] is a:
                    continue
            elif type(a) in ATOMS and type(a) is type(number[0]) and a == number[0]:
                continue
            try:
                operands = self.operands(given, wanted)
            except Differs:
                return self.other(step, func, args, kwargs or {})
            break
        self.advance()
        if operands is not given:
            n = len(args)
            args = operands[:n]
            if kwargs:
                kwargs = dict(zip(operands[n::2], operands[n + 1 :: 2]))
        if not is_plain:
            out = self.execute(step.call, func, args, kwargs or {})
            return self.returned(step, out, given, operands)
        out = func(*args, **kwargs) if kwargs else func(*args)
        number, shape, dtype = result
        if (
            (type(out) is not Tensor and not isinstance(out, Tensor))
            or out.shape != shape
            or out.dtype is not dtype
        ):
            return self.differs(step, out, given, operands)
        if operands is not given:  # user code must not get a stand-in: it may put it into a module
            for t, a in zip(operands, given):
                out = a if t is out and t is not a else out
        refs[number] = ref(out)
        self.numbers[id(out)] = number
        return out

    def advance(self) -> None:
        """Note that an expected call is about to be made."""
        if self.at >= self.stop:
            self.watch()
        at = self.at = self.at + 1
        self.due = NO_STEP if self.asleep else self.steps[at]
        if self.ledger is not None:
            self.ledger.next_call()
        for ledger in self.ledgers_around:
            ledger.next_call()

    def know(self, t: Tensor, number: int) -> None:
        """Note that ``t`` is the result with this number."""
        self.refs[number] = ref(t)
        self.numbers[id(t)] = number

    def is_result(self, t: Tensor) -> bool:
        """Whether ``t`` is the result of a call."""
        known = self.refs[self.numbers.get(id(t), 0)]
        return (known is not None and known() is t) or self._number_again(t) is not None

    def _number_again(self, t: Any) -> int | None:
        """The number of an input that a call has returned as ``t``."""
        known = self.returned_again.get(id(t))
        return known[1] if known is not None and known[0]() is t else None

    def operands(self, given: Any, wanted: list[Any]) -> Any:
        """The operands for a flat list of arguments: ``given`` itself, or a new list.

        Raises:
            Differs: an argument is not the one in the script.
        """
        refs, standins, operands = self.refs, self.standins, given
        if len(given) != len(wanted):
            raise Differs
        for i, due in enumerate(wanted):
            a = given[i]
            if type(due) is int:
                if due == INSIDE:
                    if not self.may_be_inside(a):
                        raise Differs
                    continue
                if due > 0:
                    known = refs[due]
                    if known is None or known() is not a:
                        raise Differs
                    continue
                if -due <= len(standins) and standins[-1 - due] is a:
                    continue
                if self.returned_again and self._number_again(a) == due:
                    continue
                if not isinstance(a, Tensor):
                    raise Differs
                t = self.standin_for(a, due)
                if t is not a:
                    if operands is given:
                        operands = [*given]
                    operands[i] = t
            elif type(a) in ATOMS:
                if type(a) is not type(due[0]) or a != due[0]:
                    raise Differs
            elif not is_plain(a) or tuple(a) != due[0]:
                raise Differs
        return operands

    def may_be_inside(self, a: Any) -> bool:
        """Whether an operand may have been made inside by code that no mode sees."""
        if not isinstance(a, Tensor) or any(a is standin for standin in self.standins):
            return False
        return not self.is_result(a)

    def other(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle a call that is not flat, or not the expected one."""
        due = step.call
        if func in _NO_CALLS:
            if func is saving.shown:
                if due.func != NAMED or type(args[0]) is not Tensor:
                    return self.departed(func, args, kwargs)
                try:
                    (x,) = self.operands(args[:1], due.given)
                except Differs:
                    return self.departed(func, args, kwargs)
                self.advance()
                return x
            if func in HOOKS:
                return self.hang(func, args, kwargs)
            if not isinstance(args[0], Tensor) and not kwargs.get("requires_grad"):
                if due.func != DATA:
                    return self.departed(func, args, kwargs)
                return self.keep_as(lambda: func(*args, **kwargs), due)
        if step.grad is not torch.is_grad_enabled() or not same_function(func, due.func):
            return self.departed(func, args, kwargs)
        given: list[Any] = []
        call, place = Call(func, given), self._place_in(due)
        try:
            new_args = [listed(a, given, place) for a in args]
            new_kwargs = {}
            for name, a in kwargs.items():
                given.append((name,))
                new_kwargs[name] = listed(a, given, place)
        except Differs:
            return self.departed(func, args, kwargs)
        if not self.accepts(call, due):
            return self.departed(func, args, kwargs)
        self.advance()
        out = self.execute(due, func, new_args, new_kwargs)
        return self.returned(step, out, in_a_row(args, kwargs), in_a_row(new_args, new_kwargs))

    def _place_in(self, due: Call) -> Any:
        """The ``place`` for `listed`: the number of an operand, and the tensor to use for it."""
        wanted = due.given

        def place(t: Tensor, given: list[Any]) -> tuple[int, Tensor]:
            number = wanted[len(given)] if len(given) < len(wanted) else None
            if type(number) is not int:
                raise Differs
            (new,) = self.operands([t], [number])
            return number, new

        return place

    def accepts(self, call: Call, due: Call) -> bool:
        """Whether a call is the expected one, given that its operands are."""
        return same_call(call, due, True)

    def returned(self, step: Step, out: Any, given: Any, operands: Any) -> Any:
        """Compare and number the results of a call that is not plain."""
        results = step.call.results
        if isinstance(out, Tensor):
            tensors = [out]
        else:
            _collect(out, tensors := [])
        if len(tensors) != len(results):
            return self.differs(step, out, given, operands)
        for t, (number, shape, dtype) in zip(tensors, results):
            if t.shape != shape or t.dtype is not dtype or not self._may_be(t, number):
                return self.differs(step, out, given, operands)
        if operands is not given:
            swapped = {id(b): a for a, b in zip(given, operands) if a is not b}
            if type(out) is not Tensor and any(id(t) in swapped for t in tensors):
                return self.differs(step, out, given, operands)
            out = swapped.get(id(out), out)
        for t, (number, _, _) in zip(tensors, results):
            if number > 0:
                self.know(t, number)
            elif t is not self.standins[-1 - number]:
                self.returned_again = {**self.returned_again, id(t): (ref(t), number)}
        return out

    def _may_be(self, t: Tensor, number: int) -> bool:
        """Whether a result may have this number: the number is unused, or ``t`` already has it."""
        if number < 0:
            known = self.standins[-1 - number]
        elif self.refs[number] is None or (known := self.refs[number]()) is None:
            return True
        return known is t or levels.base_of(known) is levels.base_of(t)

    def departed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Pass an unexpected call on to the listener that takes over."""
        return self.hand_over().__torch_function__(func, (), args, kwargs)

    def calls_so_far(self) -> list[Call]:
        """The log for the heir.

        The call of a region inside that is running is copied, because the heir writes to it.
        """
        calls = [*self.calls_made()]
        if self.open >= 0:
            made = calls[self.open]
            call = calls[self.open] = Call(made.func, made.given)
            call.grad, call.inner = made.grad, made.inner
        return calls

    def differs(self, step: Step, out: Any, given: Any, operands: Any) -> Any:
        """Hand over after a call whose results are not the expected ones."""
        due = step.call
        call = Call(due.func, due.given)
        call.grad = due.grad
        self.at -= 1  # this call is the heir's
        heir = self.hand_over()
        heir.go_on_after(call)
        return heir.returned(out, given, operands)

    def returns(self, results: list[Tensor]) -> list[Tensor] | None:
        """The results for the engine to hand on; ``None`` if they depart from the script."""
        self.asleep, step = True, self.due
        if step.func is not RETURN:
            return None
        numbers, refs = step.given, self.refs
        if len(results) == len(numbers):
            for t, number in zip(results, numbers):
                if number < 0 or number == INSIDE:
                    break
                if (known := refs[number]) is None or known() is not t:
                    break
            else:  # each is the expected result of a call
                self.at, self.due = self.at + 1, NO_STEP
                for ledger in self.ledgers_around:
                    ledger.next_call()
                return results
        try:
            results = self.operands(results, numbers)
        except Differs:
            return None
        self.at, self.due = self.at + 1, NO_STEP
        if self.ledger is not None:
            self.ledger.next_call()
        for ledger in self.ledgers_around:
            ledger.next_call()
        return [
            t.view_as(t) if number < 0 and levels.is_tracked(t) else t
            for t, number in zip(results, numbers)
        ]


class ForwardFollower(Follower):
    """Follows a script in a forward; the recorder takes over at a call that departs."""

    follows_whole = True  # whether it follows this script from its first call on
    changed: Any = MappingProxyType({})  # calls with other numbers than those of the script
    record: Any = None  # a ledger for calls that write
    writes: Writes | None = None
    leaves_grad_mode = True  # the grad mode that was set when the region's code returned
    heir: Captures | None = None
    hooks: Sequence[Any] = ()  # hooks on tensors that were made inside
    others: list[Script] | None = None  # other scripts to try when a call departs
    outer: Any = None  # the listener of the enclosing region
    nodes_aside = 0  # the number of nodes that regions inside have made
    further: Sequence[tuple[int, Tensor]] = ()  # tensors that leave without being returned

    def __init__(
        self,
        region: Region,
        inputs: Inputs | None,
        tensors: list[Tensor],
        script: Script,
        function: Any,
        entry: StackGuard,
        first_node: int,
        outer: Listening | None,
    ) -> None:
        """Follow ``script``. At the base level ``inputs`` is ``None`` and made when needed."""
        # (This does not call `super().__init__()`, because it runs at each call.)
        self.region, self.n_args, self.norms = region, region.n_args, region.settings.norms
        self.script, self.steps, self.kinds = script, script.steps, script.kinds
        self.due = script.steps[0]
        self.refs, self.numbers = [None] * (script.serial + 1), {}
        self.function, self.inputs, self.first_node = function, inputs, first_node
        self.backward = _torch.current_backward()
        self.depth, self.modes, self.entry = entry.functorch, entry.dispatch, entry
        if outer is not None:
            self.outer, self.ledgers_around = outer, outer.ledgers
            self.is_replayed = outer.is_replayed
            outer.inside = self
        self.foreign: dict[int, Tensor] = {}  # by the index of an input, the captured tensor
        self.leaves: Any = set()  # the ids of stand-ins that are leaves
        if inputs is not None:
            self.values, self.standins = inputs.values[0], inputs.standins
            self.leaves = inputs.leaves.keys()
            return
        self.values, self.standins = tensors, []
        for t in tensors:
            if t.requires_grad:
                t = (levels.detached(t) if self.modes else t.detach()).requires_grad_()
                self.leaves.add(id(t))
            self.standins.append(t)
        if any(map(torch.is_inference, tensors)):
            self.all_inputs()

    def all_inputs(self) -> Inputs:
        """The inputs so far."""
        if self.inputs is None:
            self.inputs = Inputs.at_the_base(self.values, self.standins)
        return self.inputs

    def run(self, body: Body) -> tuple[Any, list[Tensor]]:
        """The structure of the results, and the results on their nodes.

        If the run has departed from the script, these are the values that the region's code has
        returned, and the ``heir`` goes on with them.
        """
        _torch.push_function_mode(self)
        out: Any = body(*self.standins)
        if torch.is_grad_enabled() is not True:
            # Like any function, a region may return with grad mode switched off. Its results keep
            # their history, so the engine goes on in the grad mode of the call.
            self.leaves_grad_mode = False
            _torch.set_grad_enabled(True)
        out, how = ([out], None) if type(out) is Tensor else tree.partition(out)
        if self.heir is not None:
            return how, out
        results = self.returns(out)
        while results is None and self._another():
            results = self.returns(out)
        script, region = self.script, self.region
        nodes = _torch.next_sequence_number() - self.first_node
        nodes -= self.nodes_aside
        if self.inputs is not None:
            nodes -= self.inputs.nodes
        if region.options.is_pullback:  # there only the engine makes nodes; they don't count
            nodes = script.nodes
        if results is None or nodes != script.nodes or not _repeat_as_in(script, results):
            if results is not None:  # autograd, or a hook, has done something else
                self.at -= 1
            self.hand_over()
            return how, out
        _torch.pop_function_mode()
        del out
        if len(script.results) < len(results):
            results[:] = [results[i] for i in script.results]
        if region.draws is not None:
            region.draws = region.draws.ended()
        region.script, region.slots, region.left_behind = script, script.slots, self.refs
        if self.changed:
            region.changed = self.changed
        inputs = self.inputs
        if self.writes is not None and inputs is not None and inputs.lowest <= len(inputs.frames):
            region.written = self.writes.inputs_written()  # (only needed for a replay)
            self.writes.put_before()
        if script.partly is Partly.YES and self.follows_whole:
            script.partly = Partly.AND_FOLLOWED
        fresh = self.in_levels(results) if region.frames else self.at_the_base(results)
        if len(script.places) == len(fresh):
            return how, fresh
        return how, [fresh[i] for i in script.places]

    def at_the_base(self, results: list[Tensor]) -> list[Tensor]:
        """The results at the base level, attached to their node."""
        region, standins, values = self.region, self.standins, self.values
        required, fresh, t = [], [], None
        for t in results:
            is_required = t.requires_grad
            if is_required and t.grad_fn is None:
                is_required = any(t is standin for standin in standins)
            required.append(is_required)
            fresh.append(levels.detached(t) if self.modes else t.detach())
        if True not in required and not any(t.requires_grad for t in standins):
            return results  # they are not differentiated
        del t
        results.clear()
        n, requiring, leaves = len(fresh), self.script.requiring[0], list[Tensor]()
        inputs = self.inputs
        if self.leaves_something(()):
            further = leaving.further_results(self._recorder_at_the_end(), leaves)
            self.further, region.further = further, [number for number, _ in further]
            region.leaves = [ref(t) for t in leaves]
            fresh += [t for _, t in further]
            required += [True] * len(further)
            # The script does not say which inputs these depend on, so assume all.
            requiring = [i for i, value in enumerate(values) if value.requires_grad]
        elif inputs is None and False not in required and requiring:
            return node.attach_simply(region, values, requiring, fresh, self.outer is None)
        if True not in required or not (requiring or leaves):
            return fresh
        args = region, 0, values, requiring, leaves, fresh, required, ()
        return node.attach(*args, inputs=inputs, outermost=self.outer is None)[:n]

    def in_levels(self, results: list[Tensor]) -> list[Tensor]:
        """The results inside of transforms, attached to one node for each level."""
        inputs = self.all_inputs()
        frames = inputs.frames
        n, lowest = len(frames), inputs.lowest
        if lowest > n:  # they are not differentiated
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
                args = self.region, k, inputs.values[k], requiring, (), fresh, required[k], ()
                fresh = node.attach(*args, inputs=inputs, outermost=self.outer is None)
        if self.leaves_something(fresh):
            leaving.check_nothing_left(self._recorder_at_the_end(), fresh)
        return fresh

    def _recorder_at_the_end(self) -> Captures:
        """A recorder for a run that has followed its script to the end.

        `leaving` needs the numbers and the log that a recorder has.
        """
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
        if id(t) in self.leaves and any(t is standin for standin in standins):
            raise Differs  # this is an argument, and the script has a captured tensor here
        if self.outer is not None:
            return self._captured_around(t, k)
        inputs = self.inputs
        if self.depth or t.grad_fn is not None or t._is_view():
            if any(t is standin for standin in standins) or not self._is_foreign(t):
                raise Differs
            standin = self._admitted(levels.alive(t), k)
        else:  # the most common case: a leaf or a constant at the base level
            kind = t.shape, t.dtype, t.device, t.requires_grad
            if len(self.kinds) <= k or kind != self.kinds[k] or self.is_result(t):
                raise Differs
            value = _torch.unwrap_if_dead(t)
            if inputs is not None or value is not t or t.is_inference():
                standin = self.all_inputs().admit(levels.alive(value))
            else:
                self.values.append(t)
                standin = t
                if t.requires_grad:
                    standin = (levels.detached(t) if self.modes else t.detach()).requires_grad_()
                    self.leaves.add(id(standin))
                standins.append(standin)
        self.foreign[k] = t
        return standin

    def _captured_around(self, t: Tensor, k: int) -> Tensor:
        """The stand-in of a further input, which first becomes one of the enclosing region."""
        if any(t is standin for standin in self.standins) or not self._is_foreign(t):
            raise Differs
        inputs = self.all_inputs()
        (value,) = self.outer.take(CAPTURE, [levels.alive(t)])
        standin = inputs.admit(levels.alive(value))
        self.foreign[k] = t
        if len(self.kinds) <= k or inputs.kinds[k] != self.kinds[k]:
            raise Differs  # (it stays an input, because the enclosing region has admitted it)
        return standin

    def _is_foreign(self, t: Tensor) -> bool:
        """Whether ``t`` is known to be made outside; if not, the recorder decides."""
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
                return not value._is_view() or id(value._base) not in self.all_inputs().leaves
            value = _torch.inner_of(value)

    def _admitted(self, value: Tensor, k: int) -> Tensor:
        """The stand-in of a further input.

        Raises:
            Differs: the input is not of the kind that the script has.
        """
        inputs = self.all_inputs()
        sizes = [len(values) for values in inputs.values]
        standin = inputs.admit(value)
        if len(self.kinds) <= k or inputs.kinds[k] != self.kinds[k]:
            inputs.take_back(sizes)
            raise Differs
        return standin

    def may_be_inside(self, a: Any) -> bool:
        return super().may_be_inside(a) and not (levels.is_tracked(a) and self._is_foreign(a))

    def keep_as(self, make: Any, due: Call) -> Tensor:
        t: Tensor = make() if self.outer is None else self.outer.keep(make)
        while _torch.level_of(t) > self.depth:
            t = _torch.inner_of(t)
        if due.kept != len(self.standins):
            return self.hand_over().keep_made(t)
        try:
            standin = self._admitted(t, due.kept)
        except Differs:  # for example, it has another shape
            return self.hand_over().keep_made(t)
        self.foreign[due.kept] = t
        self.advance()
        return standin

    # -- calls

    def accepts(self, call: Call, due: Call) -> bool:
        if same_call(call, due, True):
            return True
        if self.is_replayed or type(call.func) not in _METHODS:
            return False
        if len(call.given) != len(due.given):
            return False
        if not all(map(_differ_in_number, call.given, due.given)):
            return False
        call.results, call.is_flat, call.is_plain = due.results, due.is_flat, due.is_plain
        self.changed = {**self.changed, self.at: call}
        return True

    def execute(self, due: Call, func: Any, args: Any, kwargs: Any) -> Any:
        if due.draws:
            self.note_draw([a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)])
        if not due.writes:
            return super().execute(due, func, args, kwargs)
        if self.record is None:
            self.record = Record(self.region.draws)
            self.writes = Writes(self.all_inputs(), self.script.made, self.region.title)
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

    def note_draw(self, generators: list[torch.Generator]) -> None:
        """Note that a call is about to draw, here or in a region inside.

        If ``generators`` is empty, it draws from the default generators.
        """
        draws = self.region.draws
        if draws is not None:
            for generator in generators:
                draws.note(generator)
            if not generators:
                draws.note_unseen()
        if isinstance(self.outer, ForwardFollower):  # (the ledger of a recorder sees the draw)
            self.outer.note_draw(generators)

    def hang_on_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        handle = _torch.hang_on(args[0], func, *args[1:], **kwargs)
        if isinstance(handle, RemovableHandle):
            self.hooks = (*self.hooks, handle)
        return handle

    def calls_made(self) -> list[Call]:
        calls = super().calls_made()
        if self.changed:
            calls = [self.changed.get(i, call) for i, call in enumerate(calls)]
        return calls

    def set_aside(self, nodes: int) -> None:
        self.nodes_aside += nodes

    def note_inside(self, calls: list[Call]) -> None:
        call = self.steps[self.open].call
        if calls is not call.inner:  # the region inside has followed its script with other numbers
            call = copy(call)
            call.inner = calls
            self.changed = {**self.changed, self.open: call}

    # -- departures

    def departed(self, func: Any, args: Any, kwargs: Any) -> Any:
        while self._another():
            step = self.steps[self.at]
            if step.func is func or step.func == func:
                return self.__torch_function__(func, (), args, kwargs)
        return super().departed(func, args, kwargs)

    def _another(self) -> bool:
        """Switch to another script that begins with the calls so far, if there is one."""
        at, n = self.at, len(self.standins)
        if self.is_replayed:
            return False
        if self.others is None:
            fitting = self.region.scripts.fitting(self.script.key, self.function)
            self.others = [script for script in fitting if script is not self.script]
        while self.others:
            script = self.others.pop(0)
            if script.steps[:at] == self.steps[:at] and script.kinds[:n] == self.all_inputs().kinds:
                self.script, self.steps, self.kinds = script, script.steps, script.kinds
                self.due = script.steps[at]
                self.refs += [None] * (script.serial + 1 - len(self.refs))
                self.follows_whole = at == 0
                self._let_regions_around_record()
                return True
        return False

    def _let_regions_around_record(self) -> None:
        """Let enclosing regions record: this run has departed from the one in their scripts."""
        outer = self.outer
        if outer is not None:
            if isinstance(outer, ForwardFollower) and outer.heir is None:
                outer.hand_over()  # (first, because its ledger must lie below this region's)
            self.outer = outer.listener()
            self.ledgers_around = self.outer.ledgers

    def hand_over(self) -> Captures:
        if _torch.dispatch_depth() != self.modes:
            raise departures.refused(
                f"{self.region.title} makes other calls than in its last run while a dispatch mode "
                "is active that it has entered itself. Enter the mode outside of the region."
            )
        if self.region.options.is_pullback and _torch.current_backward() != self.backward:
            raise StartOver  # see NOTE [pullbacks]
        self._let_regions_around_record()
        record = Record(self.region.draws)
        log = self.script.calls if self.is_replayed else None
        args = self.region, self.all_inputs(), record, self.outer, self.first_node, log
        heir = self.heir = Captures(*args)
        heir.inputs.nodes += self.nodes_aside
        self.due = NO_STEP
        heir.take_over(self)
        if self.open >= 0:
            heir.resume(self.open)
        heir.asleep, self.asleep = self.asleep, False
        if self.writes is None:
            self.writes = Writes(self.all_inputs(), heir.made, self.region.title)
        record.writes = self.writes
        heir.begin()
        inside = self.inside
        while inside is not None:  # (on an exception, their guards must not cut this ledger off)
            inside.modes += 1
            inside.entry.dispatch += 1
            inside = inside.inside
        return heir

    # -- the end

    def leaves_something(self, results: Sequence[Tensor]) -> bool:
        """Whether user code still holds a tensor that requires grad, after the region has run."""
        for handle in self.hooks:  # (as in `Captures.let_go`)
            handle.remove()
        given, t = list[Any](), None
        for t in self.standins:
            given.append(ref(t) if self.depth or t.requires_grad else None)
        del t
        self.given = given
        self.standins.clear()
        if self.foreign:
            self.foreign.clear()
        if self.inputs is not None:
            self.inputs.leaves.clear()
        for known in given + self.refs:
            t = None if known is None else known()
            if t is None or not levels.is_tracked(t):
                continue
            if not any(t is result for result in results):
                return True
        return False


def _repeat_as_in(script: Script, results: list[Tensor]) -> bool:
    """Whether those results are one tensor that are one in the script.

    The numbers of results say so, except in a pullback, where a hook decides what is returned.
    """
    if len(script.results) == len(results):
        return True
    firsts = [results[i] for i in script.results]
    return all(t is firsts[place] for t, place in zip(results, script.places))


def _differ_in_number(one: Any, other: Any) -> bool:
    """Whether two arguments are equal, or are numbers of the same type."""
    if one == other:
        return True
    if type(one) is not tuple or type(other) is not tuple:
        return False
    return type(one[0]) in (int, float) and type(other[0]) is type(one[0])


def _collect(out: Any, tensors: list[Tensor]) -> None:
    """Collect the tensors that a call has returned, in the order of `Listener.returned`."""
    if isinstance(out, Tensor):
        tensors.append(out)
    elif is_of(out, (tuple, list)):
        for x in contents(out) or ():
            _collect(x, tensors)
