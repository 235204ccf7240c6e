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

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functx import _torch, _tree
from functx._errors import RematError
from functx._remat import Settings, is_tracked, no_regions, unseen

MOST_BLOCKS = 32  # a block for each operation up to so many; more are taken together
_PASSIVE = {"size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex"}
_PASSIVE |= {"__len__", "__hash__", "element_size", "storage_offset", "is_grad_enabled"}
_PASSIVE |= {"_set_grad_enabled", "untyped_storage", "requires_grad_"}
_GETTERS = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn"}
_GETTERS |= {"is_cuda", "is_sparse", "is_quantized", "is_nested", "names", "_base", "output_nr"}


@dataclass(frozen=True)
class Ref:
    """A tensor in the arguments of an operation, by number."""

    number: int


@dataclass(frozen=True)
class Operation:
    """One call: the function, its arguments as leaves, the values it gives, what it ran under."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    gives: list[int]
    grad: bool
    settings: Settings

    @property
    def reads(self) -> set[int]:
        """The values among its arguments."""
        return {x.number for x in self.leaves if isinstance(x, Ref)}

    def run(self, values: dict[int, Tensor]) -> list[Tensor]:
        """Its tensors, for such values."""
        leaves = [values[x.number] if isinstance(x, Ref) else x for x in self.leaves]
        args, kwargs = _tree.unflatten(self.spec, leaves)
        now = Settings()
        same = self.grad == torch.is_grad_enabled()
        try:
            self.settings.put(now)
            with contextlib.nullcontext() if same else torch.set_grad_enabled(self.grad):
                out = self.function(*args, **kwargs)
        finally:
            now.put(self.settings)
        return _tree.parted(out)[0]


class OperationBlock:
    """Some operations, as a function of values by number, to the values that are read later.

    Attributes:
        reads: the values that it needs; others just pass.
    """

    def __init__(self, operations: Sequence[Operation], dying: Sequence[list[int]]) -> None:
        self._operations, self._dying = operations, dying
        names = [getattr(o.function, "__name__", "?") for o in operations]
        self.__qualname__ = " ".join(names[:6]) + (" ..." if len(names) > 6 else "")
        self.reads: set[int] = set()
        made: set[int] = set()
        for operation in operations:
            self.reads |= operation.reads - made
            made |= {*operation.gives}

    def __call__(self, state: dict[int, Tensor]) -> dict[int, Tensor]:
        values = dict(state)
        del state
        for operation, dying in zip(self._operations, self._dying):
            values.update(zip(operation.gives, operation.run(values), strict=True))
            for number in dying:
                del values[number]
        return values


@dataclass(frozen=True)
class Recording:
    """What a function ran.

    Attributes:
        values: what goes in, by number: the arguments, and what it reaches otherwise.
        operations: in order.
        layouts: shape, dtype and device of each value.
        cuts: where it may be cut, by the number of operations before; ends included.
        results: references, or what is no tensor; ``spec`` says how they are put together.
    """

    values: dict[int, Tensor]
    operations: list[Operation]
    layouts: list[tuple[Any, ...]]
    cuts: list[int]
    results: list[Any]
    spec: Any

    def signature(self) -> str:
        """Equal for recordings that cost the same."""
        operations = [
            (o.function, o.leaves, o.gives, o.grad, o.settings.flags, o.settings.casts)
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
        last |= {r.number: end for r in self.results if isinstance(r, Ref)}
        dying: list[list[int]] = [[] for _ in range(end + 1)]
        for n, at in last.items():
            dying[at].append(n)

        def handed_on(cut: int) -> int:
            layouts = [self.layouts[n] for n, at in born.items() if at < cut <= last[n]]
            return sum(shape.numel() * dtype.itemsize for shape, dtype, _ in layouts)

        cuts = self.cuts
        if len(cuts) > MOST_BLOCKS + 1:  # of about as many operations each, where least goes on
            near: dict[int, list[int]] = {}
            for cut in cuts[1:-1]:
                near.setdefault(round(cut * MOST_BLOCKS / end), []).append(cut)
            inner = [min(c, key=handed_on) for i, c in near.items() if 0 < i < MOST_BLOCKS]
            cuts = [0, *inner, end]
        return [
            OperationBlock(self.operations[a:b], dying[a:b]) for a, b in itertools.pairwise(cuts)
        ]

    def finish(self, state: dict[int, Tensor]) -> Any:
        """The result of the function, from the values that the last block gives."""
        values = state | self.values
        leaves = [values[r.number] if isinstance(r, Ref) else r for r in self.results]
        return _tree.unflatten(self.spec, leaves)

    def generators(self) -> set[torch.Generator]:
        """Those that operations are given."""
        leaves = [leaf for o in self.operations for leaf in o.leaves]
        return {leaf for leaf in leaves if isinstance(leaf, torch.Generator)}


class _Recorder(TorchFunctionMode):
    """Writes down what is called, on fake tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.values: dict[int, Tensor] = {}
        self.operations: list[Operation] = []
        self.layouts: list[tuple[Any, ...]] = []
        self._numbers: dict[int, int] = {}  # of fakes and of tensors from outside, by id
        self._fakes: dict[int, Tensor] = {}  # of what goes in, by number
        self._held: list[Tensor] = []  # fakes, so that ids stay theirs
        self._first: dict[int, int] = {}  # memory: number of operations before its first use
        self._written: list[tuple[int, int]] = []
        self._modes = _torch.dispatch_depth()

    def refuse(self, why: str) -> RematError:
        """An error for what can't be planned."""
        return RematError(
            f"remat: a budget for {self._name!r} can't be kept, because {why}. Plan its parts "
            "instead: functx.plan takes a list of blocks, which may be any functions."
        )

    def check_seed(self) -> None:
        """Refuse what seeds torch's generator: all draws come after it then."""
        if torch.default_generator.initial_seed() != _NOBODYS_SEED:
            raise self.refuse("it seeds torch's random generator; seed it before")

    def stand_in(self, t: Tensor) -> Tensor:
        """What stands for a tensor from outside: one like it without memory."""
        if id(t) not in self._numbers:
            made = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
            if t.is_floating_point() or t.is_complex():
                made.requires_grad_(is_tracked(t))
            number = self._numbers[id(t)] = self._number(made)
            self.values[number], self._fakes[number] = t, made
        return self._fakes[self._numbers[id(t)]]

    def _number(self, t: Tensor) -> int:
        if id(t) not in self._numbers:
            self._numbers[id(t)] = len(self.layouts)
            self.layouts.append((t.shape, t.dtype, t.device))
            self._held.append(t)
        return self._numbers[id(t)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (name == "__get__" and func.__self__.__name__ in _GETTERS) or name in _PASSIVE:
            return func(*args, **kwargs)
        if name in ("__set__", "backward", "_backward"):
            raise self.refuse(f"it calls {name} on a tensor")
        self.check_seed()
        if _torch.dispatch_depth() > self._modes:
            raise self.refuse("it enters a mode that its operations run under; enter it outside")
        leaves, spec = _tree.flatten((args, kwargs))
        bounds = [b for x in leaves if isinstance(x, slice) for b in (x.start, x.stop, x.step)]
        if any(isinstance(bound, Tensor) for bound in bounds):
            raise self.refuse("it slices by tensors")
        leaves = [self._resolved(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        versions = [(t, t._version) for t in leaves if isinstance(t, Tensor)]
        args, kwargs = _tree.unflatten(spec, leaves)
        grad, at = torch.is_grad_enabled(), len(self.operations)
        out = func(*args, **kwargs)
        made = _tree.parted(out)[0]
        for t in [*(t for t, _ in versions), *made]:
            self._first.setdefault(_torch.storage_address(t), at)
        refs = [Ref(self._numbers[id(t)]) if isinstance(t, Tensor) else t for t in leaves]
        gives = [self._number(t) for t in made]
        self.operations.append(Operation(func, refs, spec, gives, grad, Settings()))
        for t, version in versions:
            if t._version != version:
                self._written.append((self._first[_torch.storage_address(t)], at + 1))
        return out

    def _resolved(self, t: Tensor) -> Tensor:
        """The fake that a tensor is, or that stands for it."""
        is_fake = isinstance(t, _torch.FakeTensor)
        if is_fake and isinstance(t.grad_fn, torch.autograd.function.BackwardCFunction):
            raise self.refuse("it calls a custom Function, whose backward no record sees")
        if id(t) in self._numbers:
            return t if is_fake else self.stand_in(t)
        inner = t
        while _torch.is_wrapped(inner):
            inner = _torch.inner_of(inner)
        if isinstance(inner, _torch.FakeTensor):
            raise self.refuse(
                "it makes tensors where no record sees it (in a transform, or an extension)"
            )
        return self.stand_in(t)

    def finish(self, result: Any) -> Recording:
        """The function returned; hold nothing any more."""
        self.check_seed()
        leaves, spec = _tree.flatten(result)
        results = [self._resolved(x) if isinstance(x, Tensor) else x for x in leaves]
        results = [Ref(self._numbers[id(x)]) if isinstance(x, Tensor) else x for x in results]
        inside = {c for a, b in self._written for c in range(a + 1, b)}
        n = len(self.operations)
        cuts = [c for c in range(n + 1) if c not in inside or c in (0, n)]
        return Recording(self.values, self.operations, self.layouts, cuts, results, spec)

    def let_go(self) -> list[Any]:
        """Hold no fakes any more; what is alive then, somebody else holds."""
        own = {*map(id, self._fakes.values())}
        fakes = [weakref.ref(t) for t in self._held if id(t) not in own]
        self._held.clear()
        self._fakes.clear()
        return fakes


def record(f: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Recording:
    """What ``f(*args, **kwargs)`` runs.

    Raises:
        functx.RematError: that can't be found out without values.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(_NOBODYS_SEED)
    try:
        with (
            _torch.cleared_interpreter_stack(),
            unseen(),
            no_regions(),
            _torch.without_dispatch_modes(),  # nothing runs that a counter should see
            _torch.FakeTensorMode(),
        ):
            recorder = _Recorder(name)
            tensors, how = _tree.parted((args, kwargs))
            fake_args, fake_kwargs = _tree.joined([*map(recorder.stand_in, tensors)], how)
            with recorder:
                result = f(*fake_args, **fake_kwargs)
            recording = recorder.finish(result)
    except (
        _torch.DataDependentOutputException,
        _torch.DynamicOutputShapeException,
    ) as e:
        raise recorder.refuse(f"it depends on values ({e})") from e
    finally:
        generator.set_state(state)
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # it keeps casts of leaves
    made = recorder.let_go()
    del result, fake_args, fake_kwargs
    if any(ref() is not None for ref in made):
        gc.collect()
        if any(ref() is not None for ref in made):
            raise recorder.refuse(
                "it keeps a tensor otherwise than by return (in a list, an attribute, a cache)"
            )
    return recording


_NOBODYS_SEED = 0x5EED0FA71A1
