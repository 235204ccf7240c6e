"""The function mode of a region: it numbers tensors, logs calls, and compares them.

NOTE [by place]
A tensor that is neither an input nor made inside is foreign. It comes from a closure, a module or a
global name. When the region first meets a foreign tensor, the tensor becomes a further input. A
replay passes the value of that input to the same argument of the same call, whatever tensor user
code passes there at that time. So one rule covers parameters that were swapped, names that were
bound to other tensors, and tensors that were garbage collected in the meantime.
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


_TAPE = (0, 1, "outputs", "inputs")  # the arguments of `torch.autograd.grad` that are on the tape


def _as_it_is(t: Tensor, given: list[Any]) -> tuple[Any, Tensor]:
    """As `Listener._place`, for a tensor on a tape that was made outside: it is not replaced."""
    return OUTSIDE, t


class Listening:
    """The function mode that is on the stack while the code of a region runs.

    A transform or a region inside reports its arguments and its results to it. `take` logs them as
    a call of this region, and `give` numbers the results. In between, this listener sleeps; `mark`
    and `resume` identify the call that the results belong to.
    """

    asleep: bool  # the engine or a region inside is running; its calls are not this region's
    at: int  # the number of calls so far
    ledgers: tuple[Any, ...]  # the ledgers to notify of each call
    inside: Any = None  # the follower of a region that runs inside, if there is one
    is_replayed = False  # whether the run must make the same calls as an earlier run

    def listener(self) -> Any:
        """The listener that is active now: another one, if this one has handed over."""
        raise NotImplementedError

    def hears(self) -> bool:
        """Whether it is the region's own code that runs, and not the engine or an operator."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Ignore calls: the code that runs now is not the region's own."""
        self.asleep = True

    def wake(self) -> None:
        """Listen again: the region's own code continues."""
        self.asleep = False

    def take(self, title: Any, tensors: list[Any]) -> list[Any]:
        """Log a transform or a region inside as a call; returns its arguments as stand-ins.

        The ``apply`` of a custom Function has arguments that are not tensors, too. They are
        compared.
        """
        raise NotImplementedError

    def mark(self) -> int:
        """The position of the last call in the log."""
        return self.at - 1

    def resume(self, mark: int) -> None:
        """Assign the results that `give` gets next to this call."""
        raise NotImplementedError

    def log_inside(self) -> list[Call] | None:
        """The log that the region inside must make whose call was logged last."""
        raise NotImplementedError

    def wanted_inside(self) -> dict[int, Tensor | None]:
        """The results to hold of the region inside whose call was logged last, by its numbers."""
        raise NotImplementedError

    def note_inside(self, calls: list[Call]) -> None:
        """Store the log that the region inside has made."""
        raise NotImplementedError

    def give(self, tensors: list[Tensor]) -> list[Tensor]:
        """Number the results of a transform or region inside; returns inputs as stand-ins."""
        raise NotImplementedError

    def give_further(self, results: list[tuple[int, Tensor]]) -> None:
        """Number tensors that left a region inside without being returned.

        ``results`` has each with its number in that region.
        """
        raise NotImplementedError

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor of Python's or NumPy's data, made here or in a region inside.

        A replay returns the tensor of the forward (rule 3).
        """
        raise NotImplementedError

    def hang(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Register a hook on a tensor, or retain its gradient.

        A replay does not do this again for arguments, where it would be one hook too many.
        """
        raise NotImplementedError

    def hide(self, why: str) -> None:
        """Later runs can't follow this one, for what a region inside does."""

    def set_aside(self, nodes: int) -> None:
        """Note how many nodes a region inside has made.

        They are counted apart, because a recorded run makes more nodes than one that follows.
        """


class Listener(TorchFunctionMode, Listening):
    """Numbers the tensors of a region as its code runs, and compares its calls with a log.

    This class treats unexpected calls and operands as a replay does. `captures.Captures` overrides
    what a forward does differently.
    """

    def __init__(
        self, region: Region, standins: list[Tensor], ledgers: tuple[Any, ...], expected: Any
    ) -> None:
        self.region, self.standins, self.ledgers = region, standins, ledgers
        self.n_args, self.depth = region.n_args, _torch.functorch_depth()
        self.norms = region.settings.norms
        self.strict = region.options.determinism_check != "none"
        self.outer: Listening | None = None  # the listener of the enclosing region
        self.asleep = False  # the engine or a region inside is running
        # By the id of a tensor, a weak reference to it and its number. The reference is needed,
        # because an id may be used again. (And a tensor that only C++ holds gets its Python object,
        # and so an id, when Python first looks at it.)
        self.known = {id(t): (ref(t), -1 - i) for i, t in reversed([*enumerate(standins)])}
        self.serial = 0  # the number of the newest result
        self.wanted: dict[int, Tensor | None] = {}  # results that must be held, by number
        self.leaves: set[int] = set()  # numbers of results that are leaves
        self.jagged: list[Any] = []  # the symbolic sizes of nested tensors
        self.calls: list[Call] = []  # the log of this run
        self.at = 0  # the number of calls so far
        self.expect(expected)
        self.last: tuple[Call, Call | None]  # the current call, and the one expected in its place

    def expect(self, log: list[Call] | None) -> None:
        """Set the log to compare with; ``None`` in a first run."""
        self.expected, self._coming = log, iter(log or ())
        self.is_replayed = log is not None
        self.due = next(self._coming, None)  # the call that is expected next

    def listener(self) -> Listener:
        return self

    def resume(self, mark: int) -> None:
        self.last = self.calls[mark], None if self.expected is None else self.expected[mark]

    def take_over(self, follower: Any) -> None:
        """Continue a run from the call at which its follower has departed from the script."""
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
        self.serial = max([0, *numbers])  # (0 if all calls so far have returned inputs)
        self._coming = iter((self.expected or ())[self.at :])
        self.due = next(self._coming, None)

    def go_on_after(self, call: Call) -> None:
        """Note that an expected call has been made and is about to return."""
        self.last = call, self.due
        self.advance(call)

    # -- numbers

    def know(self, t: Tensor, number: int) -> None:
        """Note the number of ``t``."""
        self.known[id(t)] = ref(t), number

    def number_of(self, t: Tensor) -> int | None:
        """The number of ``t``; ``None`` if it is not known yet."""
        known = self.known.get(id(t))
        return known[1] if known is not None and known[0]() is t else None

    def number_within(self, t: Tensor) -> int | None:
        """The number of ``t``, or of the tensor that it wraps.

        Wrappers of levels that have ended, or that were entered inside, are taken off.
        """
        value = levels.alive(t)
        number = self.number_of(value)
        while number is None and _torch.level_of(value) > self.depth:
            value = levels.alive(_torch.inner_of(value))
            number = self.number_of(value)
        return number

    def meet(self, t: Tensor, number: int | None, due: Any) -> tuple[int, Tensor]:
        """The number of an operand that is unknown or unexpected, and the tensor to use for it.

        ``number`` is the number of ``t``, if it is known. ``due`` is the log's entry for this
        operand, if there is a log.
        """
        if (placed := self.placed(t, number, due)) is not None:
            return placed
        number = self.number_within(t) if number is None else number
        return (INSIDE if number is None else number), t

    def placed(self, t: Tensor, number: int | None, due: Any) -> tuple[int, Tensor] | None:
        """The input that the forward met here, whichever tensor is here now (NOTE [by place]).

        ``None`` if the forward met no input here, or if ``t`` is a result or another argument.
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
        """Wrap ``standin`` as a transform of torch.func has wrapped ``t``.

        This raises an error if the transform differentiates: it holds its own wrappers as leaves,
        and they can't be replaced.
        """
        if levels.are_one(levels.inside(t, self.depth), standin):
            return t
        if not levels.is_mapped_only(t, self.depth):
            raise departures.other_wrapped(self.region, t)
        return levels.rebased(t, standin, self.depth)

    # -- calls

    def hears(self) -> bool:
        """Whether the region's own code is running, and not the engine or an operator."""
        return not (
            self.asleep
            or key_excluded(AUTOGRAD)
            # Python code of an operator below functorch (a decomposition):
            or (peek_interpreter() is not None and not _torch.key_included(FUNCTORCH_FRONT))
            # The same, while there are levels below that the operator has yet to reach:
            or (self.depth and _torch.functorch_depth() < self.depth)
            or (self.ledgers and any(ledger.busy for ledger in self.ledgers))
        )

    @uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOOKS or not self.hears():
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.call(func, args, kwargs or {})

    def advance(self, call: Call) -> None:
        """Note that an expected call is about to be made."""
        for ledger in self.ledgers:
            ledger.next_call()
        self.calls.append(call)
        self.at += 1
        self.due = next(self._coming, None)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Log, compare and make one call of the region's code."""
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
        """Log a call that is about to be made; returns the call that is expected here."""
        due = self.due
        if self.expected is not None and (due is None or not self.matches(call, due)):
            self.departs(call, due)
            due = self.due
        self.last = call, due
        self.advance(call)
        return due

    def _place(self, t: Tensor, given: list[Any]) -> tuple[int, Tensor]:
        """The number of a tensor that is the next operand, and the tensor to use for it."""
        number, due, expected = self.number_of(t), self.due, None
        if due is not None and len(given) < len(due.given):
            expected = due.given[len(given)]
        if number is None or (due is not None and number != expected):
            return self.meet(t, number, expected)
        return number, t

    def returned(self, out: Any, given: Any, operands: Any) -> Any:
        """Number the results of a call that has returned.

        If a result is an operand, user code gets the tensor that it has passed. Otherwise an
        in-place operation could put a stand-in into a module.
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
                number = self.last[0].given[0]  # at a level, ``x.to(x.dtype)`` is a new wrapper
            elif self._number_due() in self.last[0].given:
                number = self._next()  # the other run has returned an operand; this one has not
            self._result(out, number)
            return out
        if not is_of(out, (tuple, list)):
            return out
        inside = contents(out) or ()
        new = [self._numbered(x, swaps, first) for x in inside]
        return out if all(x is y for x, y in zip(new, inside)) else sequence_like(type(out), new)

    def _number_due(self) -> int | None:
        """The number that the log has for the next result of the current call."""
        call, due = self.last
        place = len(call.results)
        return due.results[place][0] if due is not None and place < len(due.results) else None

    def _result(self, t: Tensor, number: int | None) -> None:
        """Note that ``t`` is a result of the current call.

        If ``number`` is ``None``, it gets the number in the log, or else a new one.
        """
        if number is None and (number := self._number_due()) is None:
            number = self._next()
        self.know(t, number)
        shape = t.shape if not t.is_nested else self._jagged(t)
        self.last[0].results.append((number, shape, t.dtype))
        self._seen(t, number)

    def _jagged(self, t: Tensor) -> Any:
        """The shape of a nested tensor, with symbolic sizes replaced by names.

        The symbolic size belongs to one tensor of offsets and equals only itself. Another run has
        other offsets, so each size is named by its position among those of its run.
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
        """Whether a call switches ``requires_grad`` of a captured leaf.

        A forward makes the call here. A replay does not repeat it.
        """
        return self.due is not None and self.due.given == [OUTSIDE]

    def pulls_back_outside(self, args: Any, kwargs: Any) -> bool:
        """Whether a call of ``torch.autograd.grad`` is for a tape that was made outside."""
        return self.due is not None and self.due.given[:1] == [OUTSIDE]

    # -- what a forward does differently

    def matches(self, call: Call, due: Call) -> bool:
        """Whether a call is the expected one."""
        return same_call(call, due, self.strict)

    def departs(self, call: Call, due: Call | None) -> None:
        """Raise an error for a call that is not the expected one."""
        raise departures.differently(self.region, self, call, due)

    def differs(self, call: Call, due: Call) -> None:
        """Handle a call whose results have other numbers, shapes or dtypes than expected."""
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

    # -- reports of the engine, of transforms and of regions inside

    def take(self, title: Any, tensors: list[Any]) -> list[Any]:
        asleep, self.asleep = self.asleep, True  # unpacking a dual tensor calls torch
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
        """Log the return of the region's code.

        Returns the results as the engine hands them on: each stand-in, a leaf, becomes a view.
        """
        self.asleep = True
        results = self.take(RETURN, results)
        return [
            t.view_as(t) if number < 0 and levels.is_tracked(t) else t
            for t, number in zip(results, self.last[0].given)
        ]


def listening(*, heard: bool = False) -> Listening | None:
    """The listener of the region whose code is running; ``None`` outside, and inside of a call.

    With ``heard``, it is also ``None`` if the code that is running is not the region's own.
    """
    for i in range(_torch.function_depth() - 1, -1, -1):
        mode = _torch.function_mode_at(i)
        if isinstance(mode, Listening):
            if mode.asleep or (heard and not mode.hears()):
                return None
            listener: Listening = mode.listener()
            return None if listener.asleep else listener
    return None
