"""What a region's code calls, as a function mode sees it: the log that replays are compared with.

NOTE [operands]
Each tensor that a call is given is a *number*: -1 - k for input k of the region, n for the n-th
result, `INSIDE` for a tensor made inside by what no mode sees (``Function.apply``, an engine).
Compared are the functions, in their order, the numbers of their operands, what else they are given
that is a number or a container of numbers, and the shapes and dtypes of what they return.

NOTE [by place]
A tensor that is neither an input nor made inside is foreign: the closure's, a module's, a global
one. At its first sight it becomes a further input; a replay puts that input's value where the
forward met it, whatever lies there by then. So swapped parameters, names bound again and what is
collected in the meantime are all one case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx import _torch
from functx._remat import levels, saving
from functx._remat.functions import HOOKS, LOOKS, MAKERS
from functx._remat.ledger import Ledger
from functx._remat.names import kept_copy, named
from functx._remat.operators import storage_of

INSIDE = 1 << 40
_FURTHER, _INDEX, _SHIFT = 1 << 41, (1 << 40) - 1, 60
_ATOMS = frozenset(
    {
        *(int, float, bool, str, bytes, complex, type(None), type(Ellipsis)),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    }
)
_SMALL = 1 << 12  # bytes of an array that are compared; of larger ones shape and dtype are
_NO_CALLS = {*MAKERS, *HOOKS, named}


class Call:
    """One entry of the log.

    Attributes:
        func: what was called; of a region or a transform, its title.
        operands: the numbers of its tensors.
        others: what else it was given, as far as that is compared.
        results: shape and dtype of each tensor that it returned.
        inner: of a region inside, its own log.
        kept: of a call that makes a tensor of data, the number of the input that it became.
        same: whether it returned its first operand.
    """

    __slots__ = ("func", "inner", "kept", "operands", "others", "results", "same")

    def __init__(self, func: Any, operands: list[int], others: list[Any]) -> None:
        self.func, self.operands, self.others = func, operands, others
        self.results: Any = ()
        self.inner: list[Call] | None = None
        self.kept: int | None = None
        self.same = False


class Listener(TorchFunctionMode):
    """Numbers the tensors of a region as its code runs, and writes down its calls.

    Attributes:
        asleep: whether the engine, or a region inside, runs: their calls are not this region's.
        known: by id, a weak reference to a tensor and its number. (An id alone says nothing: one
            that lives in C++ gets a Python object, and with it an id, when it is first looked at.)
        calls: the log.
        expected: the log to compare with; ``None`` in a first run.
        ledgers: this region's, and those of the regions around.
    """

    title = ""

    def __init__(self, ledger: Ledger, outer: Listener | None, expected: list[Call] | None) -> None:
        self.ledger, self.outer, self.expected = ledger, outer, expected
        self.ledgers: tuple[Any, ...] = (ledger, *(outer.ledgers if outer is not None else ()))
        self.asleep = False
        self.n_args = 0
        self.standins: list[Tensor] = []
        self.wanted: dict[int, Tensor | None] = {}  # results that are to be held, by number
        self.known: dict[int, tuple[Any, int]] = {}
        self.calls: list[Call] = []
        self.serial = 0
        self.strict = True  # whether shapes, dtypes and numbers are compared
        self.sequence = 0  # the autograd node that is next, when the last call had returned

    # -- numbers

    def know(self, t: Tensor, number: int) -> None:
        """``t`` has this number."""
        self.known[id(t)] = ref(t), number

    def number_of(self, t: Tensor) -> int | None:
        """The number of a tensor that is known."""
        known = self.known.get(id(t))
        if known is not None and known[0]() is t:
            return known[1]
        return None

    def number_within(self, t: Tensor) -> int | None:
        """The number of ``t``, or of what it wraps at levels that have ended, or are new."""
        value = levels.alive(t)
        number = self.number_of(value)
        depth = self.depth()
        while number is None and _torch.level_of(value) > depth:
            value = levels.alive(_torch.inner_of(value))
            number = self.number_of(value)
        return number

    def depth(self) -> int:
        """How many levels the region was called in."""
        raise NotImplementedError

    def meet(self, t: Tensor, number: int | None, due: int | None) -> tuple[int, Tensor]:
        """The number of a tensor that is not known, or not as expected, and what to put there.

        Args:
            t: the tensor.
            number: its number, if it is known.
            due: what the forward met here; ``None`` in a first run.
        """
        raise NotImplementedError

    def due(self) -> Call | None:
        """What the expected log has here."""
        if self.expected is None or len(self.calls) >= len(self.expected):
            return None
        return self.expected[len(self.calls)]

    def due_number(self, operands: list[int]) -> int | None:
        """What the expected log has as the next operand."""
        due = self.due()
        return None if due is None or len(operands) >= len(due.operands) else due.operands[len(operands)]

    def _as_expected(self, operands: list[int]) -> bool:
        due = self.due()
        return due is not None and due.operands == operands

    def placed(self, t: Tensor, number: int | None, due: int | None) -> tuple[int, Tensor] | None:
        """The input that the forward met here, whatever lies here now (see NOTE [by place]).

        ``None`` where it met no input, or where ``t`` is a result, or another argument.
        """
        if due is None or due >= 0:
            return None
        if number is None:
            number = self.number_within(t)
        if number == due:
            return due, t
        if number is not None and (number >= 0 or max(-1 - number, -1 - due) < self.n_args):
            return None
        if _torch.level_of(levels.alive(t)) > self.depth() or -1 - due >= len(self.standins):
            return None
        return due, self.standins[-1 - due]

    # -- calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            self.asleep
            or self.ledger.busy
            or func in LOOKS
            or _torch.key_excluded(_torch.AUTOGRAD)
            or _inside_functorch()
        ):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One call of the region's code."""
        if func in _NO_CALLS:
            if func is named:
                return self.name(*args)
            if func in HOOKS:
                self.hang(args[0])
                return func(*args, **kwargs)
            if not isinstance(args[0], Tensor) and not kwargs.get("requires_grad"):
                return self.keep(lambda: func(*args, **kwargs))
        operands: list[int] = []
        others: list[Any] = []
        given = args, kwargs
        known = self.known
        for a in args:
            if type(a) in _ATOMS:
                others.append(a)
                continue
            if (k := known.get(id(a))) is not None and k[0]() is a:
                operands.append(k[1])
                continue
            looked = False
            break
        else:
            looked = not kwargs and (self.expected is None or self._as_expected(operands))
        if not looked:
            operands, others = [], []
            args, kwargs = self._look(func, args, kwargs, operands, others)
        call = Call(func, operands, others)
        for ledger in self.ledgers:
            ledger.next_call()
        self.begin(call)
        self.count = self.ledger.count
        out = self.execute(call, func, args, kwargs)
        if isinstance(out, Tensor):
            call.results = out.shape, out.dtype
            out = self._returned(call, out, given, args, kwargs)
        elif isinstance(out, (tuple, list)) and out:
            out = self._all_returned(call, out, given, args, kwargs)
        self.end(call)
        return out

    def _look(self, func: Any, args: Any, kwargs: Any, operands: Any, others: Any) -> Any:
        """Number all tensors in the arguments, in lists and dicts too, and replace foreign ones."""
        new_args = [self._walk(a, operands, others) for a in args]
        new_kwargs = {}
        for name, a in kwargs.items():
            others.append(name)
            new_kwargs[name] = self._walk(a, operands, others)
        return new_args, new_kwargs

    def _walk(self, a: Any, operands: Any, others: Any) -> Any:
        kind = type(a)
        if kind in _ATOMS:
            others.append(a)
            return a
        if isinstance(a, Tensor):
            number = self.number_of(a)
            if number is None or (self.expected is not None and number != self.due_number(operands)):
                number, a = self.meet(a, number, self.due_number(operands))
            operands.append(number)
            return a
        if kind is list or kind is tuple:
            others.append((kind.__name__, len(a)))
            new = [self._walk(x, operands, others) for x in a]
            return a if all(x is y for x, y in zip(new, a)) else kind(new)
        if isinstance(a, tuple):  # a named tuple, a result of torch's
            others.append((kind.__name__, len(a)))
            new = [self._walk(x, operands, others) for x in a]
            if all(x is y for x, y in zip(new, a)):
                return a
            return kind(*new) if hasattr(a, "_fields") else kind(new)
        if kind is dict:
            others.append(("dict", len(a)))
            new = {k: self._walk(x, operands, others) for k, x in a.items()}
            return a if all(new[k] is a[k] for k in a) else new
        if kind is slice:
            others.append("slice")
            parts = [self._walk(x, operands, others) for x in (a.start, a.stop, a.step)]
            return slice(*parts) if any(isinstance(p, Tensor) for p in parts) else a
        if kind.__module__ == "numpy":
            others.append(_array(a))
            return a
        others.append(kind)  # a function, a generator, an object: its class alone
        return a

    def _returned(self, call: Call, out: Tensor, given: Any, args: Any, kwargs: Any) -> Tensor:
        """Number a result; an operand that is returned is the one that the caller has."""
        known = self.known.get(id(out))
        if known is not None and known[0]() is out:
            call.same = call.operands[:1] == [known[1]]
            if out.requires_grad:  # perhaps since this call, which has written to it
                self.may_leave(known, call)
            return _as_given(out, given, args, kwargs)
        if self.expected is None:
            call.same = (
                self.ledger.count == self.count and len(args) > 0 and _is_same(out, args[0])
            )
        else:
            call.same = self.expected[len(self.calls)].same
        if call.same:
            number = call.operands[0]
        else:
            number = self.serial = self.serial + 1
        self.known[id(out)] = r = ref(out), number
        if out.requires_grad:
            self.may_leave(r, call)
        return out

    def _all_returned(self, call: Call, out: Any, given: Any, args: Any, kwargs: Any) -> Any:
        metas = []
        new = []
        for x in out:
            if isinstance(x, Tensor):
                metas.append((x.shape, x.dtype))
                x = self._returned(call, x, given, args, kwargs)
            elif isinstance(x, (tuple, list)):
                x = self._all_returned(call, x, given, args, kwargs)
            new.append(x)
        call.results = (*call.results, *metas) if call.results else tuple(metas)
        if all(x is y for x, y in zip(new, out)):
            return out
        return type(out)(*new) if hasattr(out, "_fields") else type(out)(new)

    def name(self, x: Tensor, name: str) -> Tensor:
        """A value is given a name: a copy, where a policy wants it; in a replay, where one was."""
        told, copied = saving.named(levels.base_of(levels.alive(x)), name)
        if self.expected is not None:
            due, number = self.due(), self.number_of(x)
            copied = due is not None and due.func is kept_copy and due.others == [name]
            copied = copied and (number is None or due.operands == [number])
        if copied:
            x = self.call(kept_copy, (x, name), {})
        for saver in told:
            saver.naming = None
        return x

    # -- what forward and replay do differently

    def begin(self, call: Call) -> None:
        """A call is about to be made."""

    def execute(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Make it."""
        return func(*args, **kwargs) if kwargs else func(*args)

    def end(self, call: Call) -> None:
        """A call has been made."""
        self.calls.append(call)
        self.sequence = _torch.next_sequence_number()

    def may_leave(self, known: tuple[Any, int], call: Call) -> None:
        """A result that requires grad, which may leave otherwise than by return (rule 4)."""
        if known[1] in self.wanted:
            self.wanted[known[1]] = known[0]()

    def hang(self, t: Tensor) -> None:
        """A hook is about to be hung on a tensor."""

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor made of data, here or in a region inside (rule 3)."""
        raise NotImplementedError

    # -- what the engine, a transform or a region inside tells

    def take(self, title: str, tensors: list[Tensor]) -> list[Tensor]:
        """What a transform or a region inside is given, as stand-ins: a call of that title."""
        asleep, self.asleep = self.asleep, True  # taking duals apart is an operation of torch's
        operands: list[int] = []
        taken = [self._walk(t, operands, []) for t in tensors]
        for ledger in self.ledgers:
            ledger.next_call()
        call = Call(title, operands, [])
        self.begin(call)
        self.end(call)
        self.asleep = asleep
        return taken

    def result(self, t: Tensor) -> Tensor:
        """A result of the region's code, as the engine hands it on: not a leaf itself."""
        known = self.known.get(id(t))
        if known is not None and known[0]() is t and known[1] >= 0:  # the usual case, for less
            call = Call("return", [known[1]], [])
            self.begin(call)
            self.end(call)
            return t
        (t,) = self.take("return", [t])
        number = self.number_of(t)
        if number is not None and number < 0 and levels.is_tracked(t):
            return t.view_as(t)
        return t

    def give(self, tensors: list[Tensor]) -> None:
        """What a transform or a region inside has made."""
        call = self.calls[-1]
        for t in tensors:
            if self.number_of(t) is None:
                self.serial += 1
                self.known[id(t)] = r = ref(t), self.serial
                if t.requires_grad:
                    self.may_leave(r, call)
        self.sequence = _torch.next_sequence_number()

    def give_further(self, results: list[tuple[int, Tensor]]) -> None:
        """What a region inside has found to leave it otherwise than by return, by its numbers."""
        call, index = self.calls[-1], len(self.calls) - 1
        for number, t in results:
            known = self.known[id(t)] = ref(t), number << _SHIFT | _FURTHER | index
            self.may_leave(known, call)

    def wanted_inside(self) -> dict[int, Tensor | None]:
        """Which results the region inside that was just taken in is to hold, by its numbers."""
        index = _FURTHER | (len(self.calls) - 1)
        mask = (1 << _SHIFT) - 1
        return {n >> _SHIFT: None for n in self.wanted if n > INSIDE and n & mask == index}


def _is_same(out: Tensor, operand: Any) -> bool:
    """Whether a result that no operation has made is the operand: ``x.to(x.dtype)``, in a level."""
    if not isinstance(operand, Tensor):
        return False
    return storage_of(levels.base_of(out)) == storage_of(levels.base_of(operand))


def _as_given(out: Tensor, given: Any, args: Any, kwargs: Any) -> Tensor:
    """The operand that ``out`` is, as the caller has it: no stand-in must get into a module."""
    for before, after in zip(given[0], args):
        if after is out:
            return before
    for name, after in kwargs.items():
        if after is out:
            return given[1][name]
    return out


def _array(a: Any) -> Any:
    """An array or number of NumPy's, as far as it is compared."""
    if not hasattr(a, "tobytes"):
        return type(a)
    if a.nbytes > _SMALL or a.dtype.hasobject:
        return a.shape, str(a.dtype)
    return a.shape, str(a.dtype), a.tolist()


def _inside_functorch() -> bool:
    """Python that an operator runs below functorch (a decomposition), on values of some level."""
    return _torch.peek_interpreter() is not None and not _torch.key_included(
        _torch.FUNCTORCH_FRONT
    )


def listening() -> Listener | None:
    """The listener of the region whose code runs; ``None`` outside, and inside of a call."""
    for i in range(_torch.function_depth() - 1, -1, -1):
        mode = _torch.function_mode_at(i)
        if isinstance(mode, Listener):
            return None if mode.asleep else mode
    return None


def same_others(one: list[Any], other: list[Any]) -> bool:
    """Whether two calls were given the same numbers."""
    return one == other or repr(one) == repr(other)  # nan is not nan


Body = Callable[..., list[Tensor]]
