"""The function mode of a region: it numbers tensors, writes down calls, and compares them.

NOTE [by place]
A tensor that is neither an input nor made inside is foreign: the closure's, a module's, a global
one. At its first sight it becomes a further input; a replay puts that input's value where the
forward met it, whatever lies there by then. So swapped parameters, names bound again and what is
collected in the meantime are all one case.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from functx import _torch
from functx._core import NORMALISATIONS, contents, is_of, normalised, uncompiled
from functx._remat import departures, levels, saving
from functx._remat.calls import (
    DATA,
    HOOKS,
    INSIDE,
    LOOKS,
    MAKERS,
    OUTSIDE,
    READ,
    RETURN,
    SWITCHES,
    Call,
    in_a_row,
    listed,
    read_by,
    same_call,
    sequence_like,
)
from functx._remat.ledger import read_outside
from functx._remat.region import Region
from functx._torch import AUTOGRAD, FUNCTORCH_FRONT, key_excluded, peek_interpreter

Body = Callable[..., list[Tensor]]
_NO_CALLS = {*MAKERS, *HOOKS, *SWITCHES, saving.shown}


_TAPE = (0, 1, "outputs", "inputs")  # arguments of ``torch.autograd.grad`` that are on a tape


def _as_it_is(t: Tensor, given: list[Any]) -> tuple[Any, Tensor]:
    """As `Listener._place`, for what is on a tape that was made outside: nothing replaces it."""
    return OUTSIDE, t


class Listening:
    """What is on the stack of function modes while the code of a region runs.

    A transform or a region inside tells it what it is given and what it returns: `take` makes that
    a call of this region, `give` numbers its results. In between this one sleeps, and `mark` and
    `resume` say which call the results are of.
    """

    asleep: bool  # the engine, or a region inside, runs: its calls are not this region's
    at: int  # how many calls have been made
    ledgers: tuple[Any, ...]  # those that are told of each call
    inside: Any = None  # the follower of a script whose region runs inside, if one does
    is_replayed = False  # it must make the very calls of an earlier run

    def listener(self) -> Any:
        """What listens now: another one, where this one has handed over."""
        raise NotImplementedError

    def hears(self) -> bool:
        """Whether it is the region's own code that runs, and not the engine or an operator."""
        raise NotImplementedError

    def sleep(self) -> None:
        """What runs now is not the region's own code."""
        self.asleep = True

    def wake(self) -> None:
        """The region's own code runs again."""
        self.asleep = False

    def take(self, title: Any, tensors: list[Any]) -> list[Any]:
        """What a transform or a region inside is given, as stand-ins: a call of that title.

        A custom Function's ``apply`` is given other things than tensors, too, which are compared.
        """
        raise NotImplementedError

    def mark(self) -> int:
        """The call that was made last, by its place in the log."""
        return self.at - 1

    def resume(self, mark: int) -> None:
        """What is given next was made by this call."""
        raise NotImplementedError

    def log_inside(self) -> list[Call] | None:
        """The log that a region inside, which was taken in just now, must make."""
        raise NotImplementedError

    def wanted_inside(self) -> dict[int, Tensor | None]:
        """Which results the region inside, taken in just now, is to hold, by its numbers."""
        raise NotImplementedError

    def note_inside(self, calls: list[Call]) -> None:
        """The log that the region inside has made."""
        raise NotImplementedError

    def give(self, tensors: list[Tensor]) -> list[Tensor]:
        """What a transform or a region inside returns, inputs as stand-ins."""
        raise NotImplementedError

    def give_further(self, results: list[tuple[int, Tensor]]) -> None:
        """What a region inside has found to leave it otherwise than by return, by its numbers."""
        raise NotImplementedError

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor made of data, here or in a region inside: as in the forward (rule 3)."""
        raise NotImplementedError

    def hang(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Hang a hook on a tensor, or retain its gradient; not once more on an argument."""
        raise NotImplementedError

    def hide(self, why: str) -> None:
        """Later runs can't follow this one, for what a region inside does."""

    def set_aside(self, nodes: int) -> None:
        """A region inside has made so many nodes: how many depends on whether it was recorded."""


class Listener(TorchFunctionMode, Listening):
    """Numbers the tensors of a region as its code runs, and compares its calls with a log.

    A call or an operand that is not as expected is treated as in a replay; `captures.Captures` says
    how a forward differs.
    """

    def __init__(
        self, region: Region, standins: list[Tensor], ledgers: tuple[Any, ...], expected: Any
    ) -> None:
        self.region, self.standins, self.ledgers = region, standins, ledgers
        self.n_args, self.depth = region.n_args, _torch.functorch_depth()
        self.norms = region.settings.norms
        self.strict = region.options.determinism_check != "none"
        self.outer: Listening | None = None  # of the region around
        self.asleep = False  # the engine, or a region inside, runs: its calls are not this region's
        # By id, a weak reference to a tensor and its number. (An id alone says nothing: one that
        # lives in C++ gets a Python object, and with it an id, when it is first looked at.)
        self.known = {id(t): (ref(t), -1 - i) for i, t in reversed([*enumerate(standins)])}
        self.serial = 0  # the last number that a result has
        self.wanted: dict[int, Tensor | None] = {}  # results that are to be held, by number
        self.leaves: set[int] = set()  # numbers of results that are leaves
        self.jagged: list[Any] = []  # the symbolic sizes of nested tensors
        self.calls: list[Call] = []  # the log of this run
        self.at = 0  # how many calls have been made
        self.expect(expected)
        self.last: tuple[Call, Call | None]  # the call at hand, and what was expected

    def expect(self, log: list[Call] | None) -> None:
        """The log to compare with; ``None`` in a first run."""
        self.expected, self._coming = log, iter(log or ())
        self.is_replayed = log is not None
        self.due = next(self._coming, None)  # what is expected next

    def listener(self) -> Listener:
        return self

    def resume(self, mark: int) -> None:
        self.last = self.calls[mark], None if self.expected is None else self.expected[mark]

    def take_over(self, follower: Any) -> None:
        """Go on where one that has followed a script has met something else."""
        self.depth = follower.depth
        for number, known in enumerate(follower.refs):
            if known is not None and (t := known()) is not None:
                self.know(t, number)
                if t.requires_grad and t.grad_fn is None:
                    self.leaves.add(number)
        for known, number in follower.returned_again.values():
            if (t := known()) is not None:
                self.know(t, number)
        for i, known in enumerate(follower.given):
            if known is not None and (t := known()) is not None:
                self.know(t, -1 - i)
        self.calls, self.at = follower.calls_so_far(), follower.at
        numbers = [number for call in self.calls for number, _, _ in call.results]
        self.serial = max([0, *numbers])  # (a call may return an input, and no other may)
        self._coming = iter((self.expected or ())[self.at :])
        self.due = next(self._coming, None)

    def go_on_after(self, call: Call) -> None:
        """A call, which is as expected, has been made, and is about to return."""
        self.last = call, self.due
        self.advance(call)

    # -- numbers

    def know(self, t: Tensor, number: int) -> None:
        """``t`` has this number."""
        self.known[id(t)] = ref(t), number

    def number_of(self, t: Tensor) -> int | None:
        """The number of a tensor that is known."""
        known = self.known.get(id(t))
        return known[1] if known is not None and known[0]() is t else None

    def number_within(self, t: Tensor) -> int | None:
        """The number of ``t``, or of what it wraps at levels that have ended, or are new."""
        value = levels.alive(t)
        number = self.number_of(value)
        while number is None and _torch.level_of(value) > self.depth:
            value = levels.alive(_torch.inner_of(value))
            number = self.number_of(value)
        return number

    def meet(self, t: Tensor, number: int | None, due: Any) -> tuple[int, Tensor]:
        """The number of a tensor that is not known, or not as expected, and what to put there.

        ``number`` is its own, if it is known; ``due`` what the log has here, if there is one.
        """
        if (placed := self.placed(t, number, due)) is not None:
            return placed
        number = self.number_within(t) if number is None else number
        return (INSIDE if number is None else number), t

    def placed(self, t: Tensor, number: int | None, due: Any) -> tuple[int, Tensor] | None:
        """The input that the forward met here, whatever lies here now (see NOTE [by place]).

        ``None`` where it met no input, or where ``t`` is a result, or another argument.
        """
        if type(due) is not int or due >= 0:
            return None
        if number is None:
            number = self.number_within(t)
        if number == due:
            return due, levels.alive(t)
        if number is not None and (number >= 0 or max(-1 - number, -1 - due) < self.n_args):
            return None
        if -1 - due >= len(self.standins):
            return None
        value = levels.alive(t)
        if _torch.level_of(value) <= self.depth:
            return due, self.standins[-1 - due]
        if -1 - due < self.n_args or number is not None:
            return None
        return due, self.wrapped_again(value, self.standins[-1 - due])

    def wrapped_again(self, t: Tensor, standin: Tensor) -> Tensor:
        """``t``, which a transform of torch.func has wrapped, with a stand-in inside of it.

        A transform that differentiates knows its wrappers as leaves, and they can't be exchanged.
        """
        if levels.are_one(levels.inside(t, self.depth), standin):
            return t
        if not levels.is_mapped_only(t, self.depth):
            raise departures.other_wrapped(self.region, t)
        return levels.rebased(t, standin, self.depth)

    # -- calls

    def hears(self) -> bool:
        """Whether it is the region's own code that runs, and not the engine or an operator."""
        return not (
            self.asleep
            or key_excluded(AUTOGRAD)
            # Python that an operator runs below functorch (a decomposition):
            or (peek_interpreter() is not None and not _torch.key_included(FUNCTORCH_FRONT))
            # The same, where a level is left that the operator has not come to yet:
            or (self.depth and _torch.functorch_depth() < self.depth)
            or (self.ledgers and any(ledger.busy for ledger in self.ledgers))
        )

    @uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKS or not self.hears():
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.call(func, args, kwargs or {})

    def advance(self, call: Call) -> None:
        """A call is about to be made, which is as expected."""
        for ledger in self.ledgers:
            ledger.next_call()
        self.calls.append(call)
        self.at += 1
        self.due = next(self._coming, None)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One call of the region's code."""
        if func in _NO_CALLS:
            if func is saving.shown:
                return saving.name(self, *args)
            if func in HOOKS:
                return self.hang(func, args, kwargs)
            if func in SWITCHES:
                if self.changes_leaf(func, args, kwargs):
                    self.log(Call(func, [OUTSIDE]))
                    return args[0]
            elif not isinstance(args[0], Tensor) and not kwargs.get("requires_grad"):
                return self.keep(lambda: func(*args, **kwargs))
        given: list[Any] = []
        own = _TAPE if func is torch.autograd.grad and self.pulls_back_outside(args, kwargs) else ()
        if own:
            given.append(OUTSIDE)
        new_args = [
            listed(a, given, _as_it_is if i in own else self._place) for i, a in enumerate(args)
        ]
        new_kwargs = {}
        for name, a in kwargs.items():
            given.append((name,))
            new_kwargs[name] = listed(a, given, _as_it_is if name in own else self._place)
        call = Call(func, given)
        self.log(call)
        try:
            out = self.execute(call, func, new_args, new_kwargs)
        except RuntimeError as error:
            if not own or "INTERNAL ASSERT FAILED" not in str(error):
                raise
            raise departures.of_ended_level(self.region.title) from error
        return self.returned(out, in_a_row(args, kwargs), in_a_row(new_args, new_kwargs))

    def log(self, call: Call) -> Call | None:
        """A call is about to be made; returns what is expected here."""
        due = self.due
        if self.expected is not None and (due is None or not self.matches(call, due)):
            self.departs(call, due)
            due = self.due
        self.last = call, due
        self.advance(call)
        return due

    def _place(self, t: Tensor, given: list[Any]) -> tuple[int, Tensor]:
        """The number of a tensor that is the next argument, and what to put there."""
        number, due, expected = self.number_of(t), self.due, None
        if due is not None and len(given) < len(due.given):
            expected = due.given[len(given)]
        if number is None or (due is not None and number != expected):
            return self.meet(t, number, expected)
        return number, t

    def returned(self, out: Any, given: Any, operands: Any) -> Any:
        """A call has returned: number its results; where one is an operand, it is as given.

        (No stand-in must get into a module.)
        """
        call, due = self.last
        if isinstance(out, (Tensor, tuple, list)):
            swaps = {id(b): a for a, b in zip(given, operands) if a is not b}
            out = self._numbered(out, swaps, operands[0] if operands else None)
        if due is not None and call.results != due.results:
            self.differs(call, due)
        return out

    def _numbered(self, out: Any, swaps: dict[int, Tensor], first: Any) -> Any:
        if isinstance(out, Tensor):
            number = self.number_of(out)
            if number is not None:
                self._result(out, number)
                return swaps.get(id(out), out)
            if isinstance(first, Tensor) and levels.base_of(out) is levels.base_of(first):
                number = self.last[0].given[0]  # ``x.to(x.dtype)``, at a level
            elif self._number_due() in self.last[0].given:
                number = self._next()  # an operand in the other run, and not in this one
            self._result(out, number)
            return out
        if not is_of(out, (tuple, list)):
            return out
        inside = contents(out) or ()
        new = [self._numbered(x, swaps, first) for x in inside]
        return out if all(x is y for x, y in zip(new, inside)) else sequence_like(type(out), new)

    def _number_due(self) -> int | None:
        """The number that the next result of the call at hand is to have, if that is expected."""
        call, due = self.last
        place = len(call.results)
        return due.results[place][0] if due is not None and place < len(due.results) else None

    def _result(self, t: Tensor, number: int | None) -> None:
        """``t`` is a result of the call at hand; its number is what is due, or new, if ``None``."""
        if number is None and (number := self._number_due()) is None:
            number = self._next()
        self.know(t, number)
        shape = t.shape if not t.is_nested else self._jagged(t)
        self.last[0].results.append((number, shape, t.dtype))
        self._seen(t, number)

    def _jagged(self, t: Tensor) -> Any:
        """The shape of a nested tensor; each tensor of offsets has a size that equals itself alone.

        In another run it is another one, so it is named by its place among those of this run.
        """
        shape: list[Any] = []
        for n in t.shape:
            if type(n) is int:
                shape.append(n)
                continue
            places = [i for i, known in enumerate(self.jagged) if known == n]
            if not places:
                places.append(len(self.jagged))
                self.jagged.append(n)
            shape.append(f"j{places[0]}")
        return tuple(shape)

    def _seen(self, t: Tensor, number: int) -> None:
        if number in self.wanted:
            self.wanted[number] = t
        if t.requires_grad and levels.has_no_node(t):
            self.leaves.add(number)

    def _next(self) -> int:
        self.serial += 1
        return self.serial

    def changes_leaf(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a call has switched ``requires_grad`` of a captured leaf; a replay does not."""
        return self.due is not None and self.due.given == [OUTSIDE]

    def pulls_back_outside(self, args: Any, kwargs: Any) -> bool:
        """Whether a call of ``torch.autograd.grad`` is of a tape that was made outside."""
        return self.due is not None and self.due.given[:1] == [OUTSIDE]

    # -- what a forward does differently

    def matches(self, call: Call, due: Call) -> bool:
        """Whether a call is the one that is expected."""
        return same_call(call, due, self.strict)

    def departs(self, call: Call, due: Call | None) -> None:
        """A call is not the one that is expected."""
        raise departures.differently(self.region, self, call, due)

    def differs(self, call: Call, due: Call) -> None:
        """A call has not returned what is expected."""
        if self.strict:
            self.departs(call, due)

    def execute(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call."""
        if func in READ:
            read_outside(read_by(func, args, kwargs))
        if self.norms and func in NORMALISATIONS:
            return normalised(func, args, kwargs, self.norms)
        return func(*args, **kwargs) if kwargs else func(*args)

    def hang(self, func: Any, args: Any, kwargs: Any) -> Any:
        number = self.number_of(args[0])
        if number is not None and 0 <= -1 - number < self.n_args:
            return None if func is Tensor.retain_grad else RemovableHandle(OrderedDict())
        return func(*args, **kwargs)

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        return self.standins[self.log(Call(DATA, [])).kept]  # type: ignore[union-attr, index]

    # -- what the engine, a transform or a region inside tells

    def take(self, title: Any, tensors: list[Any]) -> list[Any]:
        asleep, self.asleep = self.asleep, True  # taking duals apart is an operation of torch's
        given: list[Any] = []
        taken = [listed(t, given, self._place) for t in tensors]
        self.log(Call(title, given))
        self.asleep = asleep
        return taken

    def give(self, tensors: list[Tensor]) -> list[Tensor]:
        call, due = self.last
        given = []
        for t in tensors:
            number = self.number_of(t)
            if number is None and (number := self._number_due()) is not None and number < 0:
                t = self.standins[-1 - number]
            self._result(t, number)
            given.append(t)
        if due is not None and call.results != due.results:
            self.differs(call, due)
        return given

    def give_further(self, results: list[tuple[int, Tensor]]) -> None:
        call, due = self.last
        for inner, t in results:
            number = None if due is None else due.further.get(inner)
            call.further[inner] = number = self._next() if number is None else number
            self.know(t, number)
            self._seen(t, number)

    def log_inside(self) -> list[Call] | None:
        due = self.last[1]
        return None if due is None else due.inner

    def note_inside(self, calls: list[Call]) -> None:
        self.last[0].inner = calls

    def wanted_inside(self) -> dict[int, Tensor | None]:
        due = self.last[1]
        further = {} if due is None else due.further
        return {inner: None for inner, number in further.items() if number in self.wanted}

    def finish(self, results: list[Tensor]) -> list[Tensor]:
        """The region's code has returned; the results as the engine hands them on: no leaves."""
        self.asleep = True
        results = self.take(RETURN, results)
        return [
            t.view_as(t) if number < 0 and levels.is_tracked(t) else t
            for t, number in zip(results, self.last[0].given)
        ]


def listening(*, heard: bool = False) -> Listening | None:
    """The listener of the region whose code runs; ``None`` outside, and inside of a call.

    With ``heard``, ``None`` also where it is not the region's own code that runs.
    """
    for i in range(_torch.function_depth() - 1, -1, -1):
        mode = _torch.function_mode_at(i)
        if isinstance(mode, Listening):
            if mode.asleep or (heard and not mode.hears()):
                return None
            listener: Listening = mode.listener()
            return None if listener.asleep else listener
    return None
