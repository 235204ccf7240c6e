"""Record the operations that a function runs, and cut them into blocks that can become regions.

At each call the function runs once on fake tensors, so the record has the closures, flags, training
mode and shapes of this call. A function that can't be recorded this way raises an error: for
example if its control flow depends on values, or if it calls custom Functions or transforms.

NOTE [cuts]
The tensors that are still read after a cut go from one block to the next. Memory that is written in
place must not be split between regions: the replay of one region would miss or repeat the writes of
the other. So there is no cut between the first use of such memory and the last write to it.

What could be improved: recording costs a run on fake tensors at every call, even if the plan is
found in the cache.
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

MOST_BLOCKS = 32  # with more operations than this, a block has several
# The seed of torch's generator while a function is recorded. No other code should use this number:
# if the seed changes, the function has seeded the generator.
_SEED = 0x5EED0FA71A1
# Functions that compute no tensor, so they are not recorded.
_PASSIVE = {"size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex"}
_PASSIVE |= {"__len__", "__hash__", "element_size", "storage_offset", "is_grad_enabled"}
_PASSIVE |= {"_set_grad_enabled", "untyped_storage", "requires_grad_"}
_TENSORS = {"T", "H", "mT", "mH", "data", "grad", "real", "imag"}  # attributes that are operations


@dataclass(frozen=True)
class RecordedCall:
    """One call of a torch function, with the settings that it ran under."""

    function: Callable[..., Any]
    reads: list[int]  # the numbers of the tensors among its arguments
    how: Any  # the other arguments
    gives: list[int]  # the numbers of the tensors that it returns
    grad: bool  # whether grad mode was enabled
    settings: Settings

    def run(self, values: dict[int, Tensor]) -> None:
        """Call the function again, and add its results to ``values``."""
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
    """Some operations as one function. It takes and returns a dict of numbered tensors.

    The result has the tensors that later blocks read. ``reads`` are the numbers of the tensors that
    these operations read from the argument.

    Args:
        operations: the operations in order.
        dying: for each operation, the numbers of the tensors that nothing reads after it.
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
    """Records the torch functions that a function calls, on fake tensors.

    Every tensor has a number. ``values`` has the real tensors: arguments, and captured tensors.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.values: dict[int, Tensor] = {}  # real tensors, by number
        self.operations: list[RecordedCall] = []
        self.layouts: list[tuple[Any, ...]] = []  # shape, dtype and device of each number
        self.uncut: set[int] = set()  # cuts that are not allowed: the number of operations before
        self.written: set[int] = set()  # numbers of tensors whose memory is written in place
        self.results: list[int] = []  # numbers of the tensors in the function's result
        self.how: Any = None  # the rest of the function's result
        self.fakes: dict[int, Tensor] = {}  # fake tensors by number, only while recording
        self._name = name
        self._numbers: dict[int, int] = {}  # by the id of a fake tensor or of a real one
        self._first: dict[int, int] = {}  # by storage: the number of operations before it is used
        self._modes = _torch.dispatch_depth()

    def signature(self) -> str:
        """A string that is equal for recordings with equal costs."""
        operations = [
            (o.function, o.reads, o.how, o.gives, o.grad, o.settings.flags, o.settings.casts)
            for o in self.operations
        ]
        return repr((operations, self.layouts, [*self.values], self.results))

    def blocks(self) -> list[OperationBlock]:
        """The operations as blocks. `finish` makes the result from what the last block returns."""
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

        def bytes_across(cut: int) -> int:
            layouts = [self.layouts[n] for n, at in born.items() if at < cut <= last[n]]
            return sum(shape.numel() * dtype.itemsize for shape, dtype, _ in layouts)

        inner = [cut for cut in range(1, end) if cut not in self.uncut]
        if len(inner) >= MOST_BLOCKS:
            # Cut into blocks of about equally many operations. For each, choose the cut that the
            # fewest bytes cross: later entries of `by_size` replace earlier ones.
            by_size = sorted(inner, key=lambda cut: (-bytes_across(cut), -cut))
            least = {round(cut * MOST_BLOCKS / end): cut for cut in by_size}
            inner = [least[i] for i in range(1, MOST_BLOCKS) if i in least]
        return [
            OperationBlock(self.operations[a:b], dying[a:b])
            for a, b in itertools.pairwise([0, *inner, end])
        ]

    def finish(self, state: dict[int, Tensor]) -> Any:
        """The result of the function, from the tensors that the last block returns."""
        values = state | self.values
        return tree.combine([values[n] for n in self.results], self.how)

    def refuse(self, why: str, error: BaseException | None = None) -> RematError:
        """The error for a function that can't be recorded, for the reason ``why``."""
        return RematError(
            f"remat: can't plan {self._name!r} for a budget: at {line_now(error)} {why}. "
            "Plan its parts instead: functx.plan takes a list of functions."
        )

    def check_seed(self) -> None:
        """Refuse a function that seeds torch's generator, which the record would not repeat."""
        if torch.default_generator.initial_seed() != _SEED:
            raise self.refuse("it seeds torch's random generator; seed it before the call")

    def stand_in(self, t: Tensor) -> Tensor:
        """The fake tensor that replaces a real one while recording."""
        if id(t) not in self._numbers:
            made = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
            if t.is_floating_point() or t.is_complex():
                made.requires_grad_(is_tracked(t))
            self._numbers[id(t)] = number = self.number(made)
            self.values[number] = t
        return self.fakes[self._numbers[id(t)]]

    def number(self, t: Tensor) -> int:
        """The number of a fake tensor."""
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
            raise self.refuse("it converts a module (module.to() or similar); convert it before")
        self.check_seed()
        if _torch.dispatch_depth() > self._modes:
            raise self.refuse("it enters a dispatch mode; enter the mode outside the function")
        tensors, how = tree.partition((args, kwargs))
        slices = [o[0] for o in how[1] if o and isinstance(o[0], slice)]
        if any(isinstance(bound, Tensor) for s in slices for bound in (s.start, s.stop, s.step)):
            raise self.refuse("it slices by tensors")
        operands = [*map(self.resolved, tensors)]
        versions = [t._version for t in operands]
        args, kwargs = tree.combine(operands, how)
        grad, at = torch.is_grad_enabled(), len(self.operations)
        out = func(*args, **kwargs)
        results = tree.partition(out)[0]
        reads, gives = [*map(self.number, operands)], [*map(self.number, results)]
        self.operations.append(RecordedCall(func, reads, how, gives, grad, settings_now()))
        for t in (*operands, *results):
            self._first.setdefault(_torch.storage_address(t), at)
        for t, version in zip(operands, versions):
            if t._version != version:  # see NOTE [cuts]
                memory = _torch.storage_address(t)
                self.uncut.update(range(self._first[memory] + 1, at + 1))
                same = [n for n, t in self.fakes.items() if _torch.storage_address(t) == memory]
                self.written.update(same)
        return out

    def resolved(self, t: Tensor) -> Tensor:
        """``t`` if it is a fake tensor of this recording, else the fake tensor that replaces it."""
        inner = t
        while _torch.is_wrapped(inner):
            inner = _torch.inner_of(inner)
        if isinstance(inner, _torch.FakeTensor):
            if isinstance(t.grad_fn, torch.autograd.function.BackwardCFunction):
                raise self.refuse("it calls a custom Function, whose backward can't be recorded")
            if id(t) not in self._numbers:
                raise self.refuse(
                    "it makes tensors in a way that can't be recorded (in a transform, or in an "
                    "extension)"
                )
            return t
        return self.stand_in(t)


def record(f: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Recording:
    """Record the operations of ``f(*args, **kwargs)``.

    Afterwards, modules that ``f`` reads are restored, because ``f`` may have left fake tensors
    there.

    Raises:
        functx.RematError: ``f`` can't be recorded.
    """
    state = kept_by(State((f,)))
    try:
        return _record(f, args, kwargs, name)
    finally:
        state.put_back()


def _record(f: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Recording:
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(_SEED)
    try:
        with (
            _torch.cleared_interpreter_stack(),
            unseen(),
            no_regions(),
            _torch.without_dispatch_modes(),  # counters of user code must not see the fake run
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
        raise recording.refuse(f"it depends on the values of tensors ({e})", e) from e
    except (RuntimeError, AssertionError) as e:
        if (reason := refused_by_torch(e)) is None:
            raise
        raise recording.refuse(f"it {reason}", e) from e
    finally:
        generator.set_state(state)
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # it may hold casts of fake tensors
    computed = [weakref.ref(t) for n, t in recording.fakes.items() if n not in recording.values]
    recording.fakes.clear()
    del result, tensors, fake_args, fake_kwargs
    if any(fake() is not None for fake in computed):
        gc.collect()
        if any(fake() is not None for fake in computed):
            raise recording.refuse(
                "it stores a tensor that it does not return (in a list, an attribute or a cache); "
                "return the tensor"
            )
    return recording
