"""A run that follows a script: each call is compared before it is made, and nothing is written down.

The tensors that the script numbers are held, weakly, in a list: what is a look into a dict by id for
a recorder is one comparison here. At the first call that departs from the script, stand-ins,
references and calls so far are handed over to a listener that knows how to go on, once: to the
recorder of a forward (`forward`), or to what compares a replay and raises (`replay`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx import _torch
from functx._core import NORMALISATIONS, contents, is_of, normalised, uncompiled
from functx._remat import levels, saving
from functx._remat.calls import (
    ATOMS,
    DATA,
    HOOKS,
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
from functx._remat.ledger import read_outside
from functx._remat.listener import Listener, Listening
from functx._remat.region import NEVER, Region
from functx._remat.script import Script, Step
from functx._torch import AUTOGRAD, FUNCTORCH_FRONT, key_excluded, peek_interpreter

_NO_CALLS = {*MAKERS, *HOOKS, saving.shown}


class Differs(Exception):
    """An operand is not what the script has."""


class Follower(TorchFunctionMode, Listening):
    """Compares the calls of a run with those of a script."""

    stop = NEVER  # the call at which a ledger begins to listen
    ledger: Any = None  # which has begun
    asleep = False  # the region's code has returned
    heir: Any = None  # the listener that goes on, where a call has departed
    at = 0  # how many calls have been made
    given: Sequence[Any] = ()  # when stand-ins have been dropped, they, weakly
    # Inputs that a call has returned as other Python objects, ``x.to(x.dtype)`` at a level, say:
    # by their ids, weakly, and the number of the input.
    returned_again: Mapping[int, Any] = MappingProxyType({})

    region: Region
    n_args: int
    norms: int
    depth: int  # how many levels there were when the region began
    script: Script
    steps: Sequence[Step]
    standins: list[Tensor]
    refs: list[Any]  # by number, weakly, what was returned
    numbers: dict[int, int]  # by the id of a result, which may be gone

    # -- what a forward and a replay do in their own ways

    def hand_over(self) -> Listener:
        """A call departs: what goes on from here, also with later calls."""
        raise NotImplementedError

    def standin_for(self, t: Tensor, number: int) -> Tensor:
        """The stand-in to put in the place of ``t``, where input ``number`` is due."""
        raise NotImplementedError

    def keep(self, make: Any, due: Call) -> Tensor:
        """A tensor made of data."""
        raise NotImplementedError

    def execute(self, due: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call that is not plain."""
        if func in READ:
            read_outside(read_by(func, args, kwargs))
        if self.norms and func in NORMALISATIONS:
            return normalised(func, args, kwargs, self.norms)
        return func(*args, **kwargs) if kwargs else func(*args)

    def watch(self) -> None:
        """The call at which a ledger is to begin to listen has come."""

    # -- what both do

    def listener(self) -> Listener:
        """For a transform or a region inside, which no script has."""
        return self.heir or self.hand_over()

    def hears(self) -> bool:
        """As `Listener.hears`."""
        if self.heir is not None:
            return bool(self.heir.hears())
        return not (
            self.asleep
            or key_excluded(AUTOGRAD)
            or (peek_interpreter() is not None and not _torch.key_included(FUNCTORCH_FRONT))
            or (self.ledger is not None and self.ledger.busy)
        )

    def calls_made(self) -> list[Call]:
        """The log so far."""
        return self.script.calls[: self.at]

    @uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.heir is not None:
            return self.heir.__torch_function__(func, types, args, kwargs)
        ledger = self.ledger
        if (
            self.asleep
            or func in LOOKS
            or key_excluded(AUTOGRAD)
            # (As in `Listener`.)
            or (peek_interpreter() is not None and not _torch.key_included(FUNCTORCH_FRONT))
            or (ledger is not None and ledger.busy)
        ):
            return func(*args, **kwargs) if kwargs else func(*args)
        at = self.at
        if at >= self.stop and ledger is None:
            self.watch()
            ledger = self.ledger
        due, grad, wanted, is_flat, is_plain, result, _ = step = self.steps[at]
        if not is_flat or func is not due or grad is not torch.is_grad_enabled():
            return self.other(step, func, args, kwargs or {})
        given = operands = args if not kwargs else in_a_row(args, kwargs)
        if len(given) != len(wanted):
            return self.other(step, func, args, kwargs or {})
        # (What `operands` does, where nothing is to be put in the place of anything.)
        refs, standins = self.refs, self.standins
        for a, number in zip(given, wanted):
            if type(number) is int:
                if number > 0 and (known := refs[number]) is not None and known() is a:
                    continue
                if -len(standins) <= number < 0 and standins[-1 - number] is a:
                    continue
            elif type(a) in ATOMS and type(a) is type(number[0]) and a == number[0]:
                continue
            try:
                operands = self.operands(given, wanted)
            except Differs:
                return self.other(step, func, args, kwargs or {})
            break
        self.at = at + 1
        if ledger is not None:
            ledger.next_call()
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
        if operands is not given:  # no stand-in must get into a module
            for t, a in zip(operands, given):
                out = a if t is out and t is not a else out
        refs[number] = ref(out)
        self.numbers[id(out)] = number
        return out

    def know(self, t: Tensor, number: int) -> None:
        """``t`` is a result."""
        self.refs[number] = ref(t)
        self.numbers[id(t)] = number

    def is_result(self, t: Tensor) -> bool:
        """Whether ``t`` is a result."""
        known = self.refs[self.numbers.get(id(t), 0)]
        return (known is not None and known() is t) or self._number_again(t) is not None

    def _number_again(self, t: Any) -> int | None:
        """The number of an input that a call has returned as ``t``."""
        known = self.returned_again.get(id(t))
        return known[1] if known is not None and known[0]() is t else None

    def operands(self, given: Any, wanted: list[Any]) -> Any:
        """What to call with, for a flat list of arguments: ``given`` itself, or a new list.

        Raises:
            Differs: something is not what the script has.
        """
        refs, standins, operands = self.refs, self.standins, given
        if len(given) != len(wanted):
            raise Differs
        for i, due in enumerate(wanted):
            a = given[i]
            if type(due) is int:
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

    def other(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that is not plain, or not as expected."""
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
                if not self.is_result(args[0]):
                    return self.departed(func, args, kwargs)
                return func(*args, **kwargs)
            if not isinstance(args[0], Tensor) and not kwargs.get("requires_grad"):
                if due.func != DATA:
                    return self.departed(func, args, kwargs)
                return self.keep(lambda: func(*args, **kwargs), due)
        if step.grad is not torch.is_grad_enabled() or not same_function(func, due.func):
            return self.departed(func, args, kwargs)
        call = Call(func, given := [])
        place = self._place_in(due)
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
        """For `listed`: the number of a tensor that a call is given, and what to put there."""
        wanted = due.given

        def place(t: Tensor, given: list[Any]) -> tuple[int, Tensor]:
            number = wanted[len(given)] if len(given) < len(wanted) else None
            if type(number) is not int:
                raise Differs
            (new,) = self.operands([t], [number])
            return number, new

        return place

    def accepts(self, call: Call, due: Call) -> bool:
        """Whether a call, whose operands are as expected, is."""
        return same_call(call, due, True)

    def advance(self) -> None:
        """A call is about to be made, which is as expected."""
        self.at += 1
        if self.ledger is not None:
            self.ledger.next_call()

    def returned(self, step: Step, out: Any, given: Any, operands: Any) -> Any:
        """A call that is not plain has returned."""
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
            if type(out) is not Tensor and any([id(t) in swapped for t in tensors]):
                return self.differs(step, out, given, operands)
            out = swapped.get(id(out), out)
        for t, (number, _, _) in zip(tensors, results):
            if number > 0:
                self.know(t, number)
            elif t is not self.standins[-1 - number]:
                self.returned_again = {**self.returned_again, id(t): (ref(t), number)}
        return out

    def _may_be(self, t: Tensor, number: int) -> bool:
        """Whether a result may have this number: it is new, or that operand."""
        if number < 0:
            known = self.standins[-1 - number]
        elif self.refs[number] is None or (known := self.refs[number]()) is None:
            return True
        return known is t or levels.base_of(known) is levels.base_of(t)

    def departed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call is not as expected: it is handed on."""
        return self.hand_over().__torch_function__(func, (), args, kwargs)

    def differs(self, step: Step, out: Any, given: Any, operands: Any) -> Any:
        """A call has not returned what is expected."""
        due = step.call
        call = Call(due.func, due.given)
        call.grad = due.grad
        self.at -= 1
        heir = self.hand_over()
        heir.go_on_after(call)
        return heir.returned(out, given, operands)

    def returns(self, results: list[Tensor]) -> list[Tensor] | None:
        """The region's code has returned: what the engine hands on; ``None`` if it departs."""
        self.asleep = True
        step = self.steps[self.at]
        if step.func != RETURN:
            return None
        numbers = step.given
        try:
            results = self.operands(results, numbers)
        except Differs:
            return None
        self.at += 1
        if self.ledger is not None:
            self.ledger.next_call()
        return [
            t.view_as(t) if number < 0 and levels.is_tracked(t) else t
            for t, number in zip(results, numbers)
        ]


def _collect(out: Any, tensors: list[Tensor]) -> None:
    """The tensors in what a call has returned, as `Listener.returned` numbers them."""
    if isinstance(out, Tensor):
        tensors.append(out)
    elif is_of(out, (tuple, list)):
        for x in contents(out) or ():
            _collect(x, tensors)
