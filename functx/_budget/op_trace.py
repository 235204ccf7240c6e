"""A function as the list of operations that it runs, cut into blocks that can be regions.

The function runs on fake tensors of the arguments' shapes, at each call anew: closures, flags,
training mode and shapes are those of this call. What can't be found out that way (control flow that
depends on values, custom Functions, transforms inside) is an error; nothing is guessed.

NOTE [cuts]
Between any two operations the tensors that are still read go from one block to the next. Memory
that an operation writes to in place is not to be split between regions: there is no cut between
its first use and the last write.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx import _torch
from functx._compile import State, kept_by, refused_by_torch
from functx._core import RematError, line_now, tree
from functx._remat import Settings, is_tracked, no_regions, settings_now, sharding, unseen

MOST_BLOCKS = 32  # a block for each operation up to so many; more are taken together
_SEED = 0x5EED0FA71A1  # of the random generator while a function is recorded, and of nobody else
_PASSIVE = {"size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex"}
_PASSIVE |= {"__len__", "__hash__", "element_size", "storage_offset", "is_grad_enabled"}
_PASSIVE |= {"_set_grad_enabled", "untyped_storage", "requires_grad_"}
_TENSORS = {"T", "H", "mT", "mH", "data", "grad", "real", "imag"}  # attributes that are operations


@dataclass(frozen=True)
class RecordedCall:
    """One call, and what it ran under."""

    function: Callable[..., Any]
    reads: list[int]  # the tensors among its arguments, by number
    how: Any  # the other arguments
    gives: list[int]  # the tensors that it returns, by number
    grad: bool  # whether grad mode was on
    settings: Settings

    def run(self, values: dict[int, Tensor]) -> None:
        """Add what it gives to the values."""
        args, kwargs = tree.combine([values[n] for n in self.reads], self.how)
        now = settings_now()
        try:
            self.settings.put(now)
            with torch.set_grad_enabled(self.grad):
                out = self.function(*args, **kwargs)
        finally:
            now.put(self.settings)
        values.update(zip(self.gives, tree.partition(out)[0], strict=True))


class OperationBlock:
    """Some operations, as a function of values by number, to the values that are read later.

    It ``reads`` some; others just pass.
    """

    def __init__(self, operations: Sequence[RecordedCall], dying: Sequence[list[int]]) -> None:
        self._operations, self._dying = operations, dying
        names = [getattr(o.function, "__name__", "?") for o in operations]
        self.__qualname__ = " ".join(names[:6]) + (" ..." if len(names) > 6 else "")
        self.reads: set[int] = set()
        made: set[int] = set()
        for operation in operations:
            self.reads |= {*operation.reads} - made
            made |= {*operation.gives}

    def __call__(self, state: dict[int, Tensor]) -> dict[int, Tensor]:
        values = dict(state)
        del state
        for operation, dying in zip(self._operations, self._dying):
            operation.run(values)
            for number in dying:
                del values[number]
        return values


class Recording(TorchFunctionMode):
    """Writes down what a function calls, on fake tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.values: dict[int, Tensor] = {}  # arguments, and what it reaches otherwise
        self.operations: list[RecordedCall] = []
        self.layouts: list[tuple[Any, ...]] = []  # shape, dtype and device of each value
        self.uncut: set[int] = set()  # where no cut may be, by the number of operations before
        self.written: set[int] = set()  # what lies in memory that is written in place
        self.results: list[int] = []
        self.how: Any = None  # what else is in the result
        self.fakes: dict[int, Tensor] = {}  # by number, while it records
        self._name = name
        self._numbers: dict[int, int] = {}  # of fakes and of tensors from outside, by id
        self._first: dict[int, int] = {}  # memory: number of operations before its first use
        self._modes = _torch.dispatch_depth()

    def signature(self) -> str:
        """Equal for recordings that cost the same."""
        operations = [
            (o.function, o.reads, o.how, o.gives, o.grad, o.settings.flags, o.settings.casts)
            for o in self.operations
        ]
        return repr((operations, self.layouts, [*self.values], self.results))

    def blocks(self) -> list[OperationBlock]:
        """The operations in blocks; `finish` makes the result of what the last one gives."""
        born: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, operation in enumerate(self.operations):
            born |= {n: at for n in operation.gives if n not in born and n not in self.values}
            last |= dict.fromkeys([*operation.reads, *operation.gives], at)
        end = len(self.operations)
        last |= dict.fromkeys(self.results, end)
        dying: list[list[int]] = [[] for _ in range(end + 1)]
        for number, at in last.items():
            dying[at].append(number)

        def handed_on(cut: int) -> int:
            layouts = [self.layouts[n] for n, at in born.items() if at < cut <= last[n]]
            return sum(shape.numel() * dtype.itemsize for shape, dtype, _ in layouts)

        inner = [cut for cut in range(1, end) if cut not in self.uncut]
        if len(inner) >= MOST_BLOCKS:  # of about as many operations each, where least is handed on
            by_size = sorted(inner, key=lambda cut: (-handed_on(cut), -cut))
            least = {round(cut * MOST_BLOCKS / end): cut for cut in by_size}
            inner = [least[i] for i in range(1, MOST_BLOCKS) if i in least]
        return [
            OperationBlock(self.operations[a:b], dying[a:b])
            for a, b in itertools.pairwise([0, *inner, end])
        ]

    def finish(self, state: dict[int, Tensor]) -> Any:
        """The result of the function, from the values that the last block gives."""
        values = state | self.values
        return tree.combine([values[n] for n in self.results], self.how)

    def refuse(self, why: str, error: BaseException | None = None) -> RematError:
        """An error for what can't be planned."""
        return RematError(
            f"remat: a budget for {self._name!r} can't be kept: at {line_now(error)} {why}. "
            "Plan its parts: functx.plan takes a list of blocks, which may be any functions."
        )

    def check_seed(self) -> None:
        """Refuse what seeds torch's generator: all draws come after it then."""
        if torch.default_generator.initial_seed() != _SEED:
            raise self.refuse("it seeds torch's random generator; seed it before")

    def stand_in(self, t: Tensor) -> Tensor:
        """What stands for a tensor from outside: one like it without memory."""
        if id(t) not in self._numbers:
            made = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
            if t.is_floating_point() or t.is_complex():
                made.requires_grad_(is_tracked(t))
            self._numbers[id(t)] = number = self.number(made)
            self.values[number] = t
        return self.fakes[self._numbers[id(t)]]

    def number(self, t: Tensor) -> int:
        """The number of a fake."""
        if id(t) not in self._numbers:
            number = self._numbers[id(t)] = len(self.fakes)
            self.fakes[number] = t
            self.layouts.append((t.shape, t.dtype, t.device))
        return self._numbers[id(t)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _PASSIVE or (name == "__get__" and func.__self__.__name__ not in _TENSORS):
            return func(*args, **kwargs)
        if name in ("__set__", "backward", "_backward"):
            raise self.refuse(f"it calls {name} on a tensor")
        if func is _torch.ASKED_BY_CONVERSIONS:
            raise self.refuse("it converts a module, by module.to() or the like; convert it before")
        self.check_seed()
        if _torch.dispatch_depth() > self._modes:
            raise self.refuse("it enters a mode that its operations run under; enter it outside")
        tensors, how = tree.partition((args, kwargs))
        slices = [o[0] for o in how[1] if o and isinstance(o[0], slice)]
        if any(isinstance(bound, Tensor) for s in slices for bound in (s.start, s.stop, s.step)):
            raise self.refuse("it slices by tensors")
        given = [*map(self.resolved, tensors)]
        versions = [t._version for t in given]
        args, kwargs = tree.combine(given, how)
        grad, at = torch.is_grad_enabled(), len(self.operations)
        out = func(*args, **kwargs)
        made = tree.partition(out)[0]
        reads, gives = [[*map(self.number, ts)] for ts in (given, made)]
        self.operations.append(RecordedCall(func, reads, how, gives, grad, settings_now()))
        for t in (*given, *made):
            self._first.setdefault(_torch.storage_address(t), at)
        for t, version in zip(given, versions):
            if t._version != version:  # see NOTE [cuts]
                memory = _torch.storage_address(t)
                self.uncut.update(range(self._first[memory] + 1, at + 1))
                same = [n for n, t in self.fakes.items() if _torch.storage_address(t) == memory]
                self.written.update(same)
        return out

    def resolved(self, t: Tensor) -> Tensor:
        """The fake that a tensor is, or that stands for it."""
        inner = t
        while _torch.is_wrapped(inner):
            inner = _torch.inner_of(inner)
        if isinstance(inner, _torch.FakeTensor):
            if isinstance(t.grad_fn, torch.autograd.function.BackwardCFunction):
                raise self.refuse("it calls a custom Function, whose backward no record sees")
            if id(t) not in self._numbers:
                raise self.refuse(
                    "it makes tensors where no record sees it (in a transform, or an extension)"
                )
            return t
        return self.stand_in(t)


def record(f: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Recording:
    """What ``f(*args, **kwargs)`` runs.

    Modules that ``f`` reads are as before afterwards, also if it leaves fake tensors there.

    Raises:
        functx.RematError: that can't be found out without values.
    """
    kept = kept_by(State((f,)))
    try:
        return _record(f, args, kwargs, name)
    finally:
        kept.put_back()


def _record(f: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Recording:
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(_SEED)
    try:
        with (
            _torch.cleared_interpreter_stack(),
            unseen(),
            no_regions(),
            _torch.without_dispatch_modes(),  # nothing runs that a counter should see
            _torch.FakeTensorMode(),
            sharding.watching(f"a budget for {name!r}", RematError),
        ):
            recording = Recording(name)
            tensors, how = tree.partition((args, kwargs))
            fake_args, fake_kwargs = tree.combine([*map(recording.stand_in, tensors)], how)
            with recording:
                result = f(*fake_args, **fake_kwargs)
            recording.check_seed()
            tensors, recording.how = tree.partition(result)
            recording.results = [recording.number(recording.resolved(t)) for t in tensors]
    except (_torch.DataDependentOutputException, _torch.DynamicOutputShapeException) as e:
        raise recording.refuse(f"it depends on values, as of item() ({e})", e) from e
    except (RuntimeError, AssertionError) as e:
        if (said := refused_by_torch(e)) is None:
            raise
        raise recording.refuse(f"it {said}", e) from e
    finally:
        generator.set_state(state)
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # it keeps casts of leaves
    made = [weakref.ref(t) for n, t in recording.fakes.items() if n not in recording.values]
    recording.fakes.clear()
    del result, tensors, fake_args, fake_kwargs
    if any(fake() is not None for fake in made):
        gc.collect()
        if any(fake() is not None for fake in made):
            raise recording.refuse(
                "it keeps a tensor otherwise than by return (in a list, an attribute, a cache)"
            )
    return recording
