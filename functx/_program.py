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


@dataclass
class Operation:
    """One call: the function, its arguments as leaves, the values it gives, the grad mode.

    Attributes:
        settings: that it ran under, where the program had changed them.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    gives: list[int]
    grad: bool
    settings: Settings | None

    def run(self, values: dict[int, Tensor]) -> list[Tensor]:
        """Its tensors, for such values."""
        leaves = [values[x.number] if isinstance(x, Ref) else x for x in self.leaves]
        args, kwargs = _tree.unflatten(self.spec, leaves)
        now = Settings()
        wanted = self.settings or now
        try:
            wanted.put(now)
            if self.grad == torch.is_grad_enabled():
                out = self.function(*args, **kwargs)
            else:
                with torch.set_grad_enabled(self.grad):
                    out = self.function(*args, **kwargs)
        finally:
            now.put(wanted)
        return [t for t in _tree.leaves(out) if isinstance(t, Tensor)]


class Block:
    """Some operations of a program, as a function of values by number, to values by number.

    Attributes:
        reads: the values that it needs; others just pass.
        gives: the values that are there afterwards.
    """

    def __init__(self, operations: Sequence[Operation], gives: Sequence[int]) -> None:
        self._operations = operations
        self.gives = sorted(gives)
        names = [getattr(o.function, "__name__", "?") for o in operations]
        self.__qualname__ = " ".join(names[:6]) + (" ..." if len(names) > 6 else "")
        last: dict[int, int] = {}
        made: set[int] = set()
        self.reads: set[int] = set()
        for at, operation in enumerate(operations):
            read = {x.number for x in operation.leaves if isinstance(x, Ref)}
            self.reads |= read - made
            made |= {*operation.gives}
            last |= dict.fromkeys(read | {*operation.gives}, at)
        kept = {*self.gives}
        self._dead = [
            [n for n, end in last.items() if end == at and n not in kept]
            for at in range(len(operations))
        ]

    def __call__(self, state: dict[int, Tensor]) -> dict[int, Tensor]:
        values = dict(state)
        del state
        for operation, dead in zip(self._operations, self._dead):
            values.update(zip(operation.gives, operation.run(values), strict=True))
            for number in dead:
                values.pop(number, None)
        return {n: values[n] for n in self.gives if n in values}


class Program:
    """What a function ran.

    Attributes:
        values: what goes in, by number: the arguments, and what it reaches otherwise.
        operations: in order.
        layouts: shape, dtype and device of each value.
        cuts: where it may be cut, by the number of operations before; ends included.
        results: references, or what is no tensor; ``spec`` says how they are put together.
        settings: that it began under.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.values: dict[int, Tensor] = dict(enumerate(inputs))
        self.operations: list[Operation] = []
        self.layouts: dict[int, Any] = {}
        self.cuts: list[int] = []
        self.results: list[Any] = []
        self.spec: Any = None
        self.settings = Settings()

    def signature(self) -> tuple[Any, ...]:
        """Equal for programs that cost the same."""
        operations = [
            (o.function, o.grad, _flags(o.settings), *o.gives, *map(_plain, o.leaves))
            for o in self.operations
        ]
        return (
            tuple(self.layouts.items()),
            tuple(self.values),
            tuple(operations),
            _flags(self.settings),
            tuple(map(_plain, self.results)),  # what is returned stays
        )

    def blocks(self) -> list[Block]:
        """The program in blocks; `finish` makes the result of what the last one gives."""
        end = len(self.operations)
        last: dict[int, int] = {}
        born = dict.fromkeys(self.values, -1)
        for at, operation in enumerate(self.operations):
            last |= {x.number: at for x in operation.leaves if isinstance(x, Ref)}
            for number in operation.gives:
                born.setdefault(number, at)
        last |= {r.number: end for r in self.results if isinstance(r, Ref)}

        def live(cut: int) -> list[int]:
            return [n for n, at in born.items() if at < cut <= last.get(n, -1)]

        cuts = self._chosen(live)
        return [Block(self.operations[a:b], live(b)) for a, b in itertools.pairwise(cuts)]

    def _chosen(self, live: Callable[[int], list[int]]) -> list[int]:
        """Cuts for blocks of about as many operations each, where least is handed on."""
        cuts, n = self.cuts, len(self.operations)
        if len(cuts) <= MOST_BLOCKS + 1:
            return cuts

        def handed_on(cut: int) -> int:
            layouts = [self.layouts[n] for n in live(cut) if n not in self.values]
            return sum(shape.numel() * dtype.itemsize for shape, dtype, _ in layouts)

        chosen = [0]
        for i in range(1, MOST_BLOCKS):
            middle, reach = i * n / MOST_BLOCKS, n / MOST_BLOCKS / 2
            near = [c for c in cuts if abs(c - middle) <= reach and chosen[-1] < c < n]
            if near:
                chosen.append(min(near, key=lambda c: (handed_on(c), abs(c - middle))))
        return [*chosen, n]

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

    def __init__(self, program: Program, name: str) -> None:
        super().__init__()
        self._program, self._name = program, name
        self._numbers: dict[int, int] = {}  # of fakes and of tensors from outside, by id
        self._held: list[Tensor] = []  # so that ids stay theirs
        self.fakes: dict[int, Tensor] = {}  # of what goes in, by number
        self._first: dict[int, int] = {}  # memory: number of operations before its first use
        self._written: list[tuple[int, int]] = []
        self._modes = _torch.dispatch_depth()
        for t in [*program.values.values()]:
            self.fake(t, len(self.fakes))

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

    def fake(self, t: Tensor, number: int) -> Tensor:
        """A tensor like ``t`` without memory."""
        made = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
        if t.is_floating_point() or t.is_complex():
            made.requires_grad_(is_tracked(t))
        self.fakes[number] = made
        self._numbers[id(t)] = number
        self._know(made, number)
        return made

    def _know(self, t: Tensor, number: int) -> int:
        self._numbers[id(t)] = number
        self._held.append(t)
        self._program.layouts[number] = t.shape, t.dtype, t.device
        return number

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
        stand = [self._resolved(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(isinstance(x, slice) and isinstance(x.start, Tensor) for x in leaves):
            raise self.refuse("it slices by tensors")
        refs = [Ref(self._numbers[id(t)]) if isinstance(t, Tensor) else t for t in stand]
        before = [(t, t._version) for t in stand if isinstance(t, Tensor)]
        at = len(self._program.operations)
        for t, _ in before:
            self._first.setdefault(_torch.storage_address(t), at)
        grad = torch.is_grad_enabled()
        new_args, new_kwargs = _tree.unflatten(spec, stand)
        out = func(*new_args, **new_kwargs)
        gives = []
        for t in _tree.leaves(out):
            if isinstance(t, Tensor):
                known = self._numbers.get(id(t))
                number = len(self._program.layouts) if known is None else known
                gives.append(self._know(t, number))
                self._first.setdefault(_torch.storage_address(t), at)
        now = Settings()
        same = _flags(now) == _flags(self._program.settings)
        operation = Operation(func, refs, spec, gives, grad, None if same else now)
        self._program.operations.append(operation)
        for t, version in before:
            if t._version != version:
                self._written.append((self._first[_torch.storage_address(t)], at + 1))
        return out

    def _resolved(self, t: Tensor) -> Tensor:
        number = self._numbers.get(id(t))
        by_function = isinstance(t.grad_fn, torch.autograd.function.BackwardCFunction)
        if by_function and isinstance(t, _torch.FakeTensor):
            raise self.refuse("it calls a custom Function, whose backward no record sees")
        if number is not None:
            return self.fakes.get(number, t)
        inner = t
        while _torch.is_wrapped(inner):
            inner = _torch.inner_of(inner)
        if isinstance(inner, _torch.FakeTensor):
            raise self.refuse(
                "it makes tensors where no record sees it (in a transform, or an extension)"
            )
        number = len(self._program.layouts)
        self._program.values[number] = t
        self._held.append(t)
        return self.fake(t, number)

    def finish(self, result: Any) -> None:
        """The function returned."""
        leaves, program = _tree.leaves(result), self._program
        program.spec = _tree.flatten(result)[1]
        program.results = [
            Ref(self._numbers[id(self._resolved(x))]) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        n = len(program.operations)
        inside = {c for a, b in self._written for c in range(a + 1, b)}
        program.cuts = [c for c in range(n + 1) if c not in inside or c in (0, n)]

    def let_go(self) -> list[Any]:
        """Hold nothing any more; what is alive then, somebody else holds."""
        own = {id(t) for t in self.fakes.values()}
        fakes = [t for t in self._held if isinstance(t, _torch.FakeTensor)]
        refs = [weakref.ref(t) for t in fakes if id(t) not in own]
        self._held.clear()
        self.fakes.clear()
        return refs


def record(f: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Program:
    """What ``f(*args, **kwargs)`` runs.

    Raises:
        functx.RematError: that can't be found out without values.
    """
    leaves, spec = _tree.flatten((args, kwargs))
    inputs = [*{id(x): x for x in leaves if isinstance(x, Tensor)}.values()]
    places = {id(x): i for i, x in enumerate(inputs)}
    program = Program(inputs)
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
            recorder = _Recorder(program, name)
            stand = [recorder.fakes[places[id(x)]] if isinstance(x, Tensor) else x for x in leaves]
            fake_args, fake_kwargs = _tree.unflatten(spec, stand)
            with recorder:
                result = f(*fake_args, **fake_kwargs)
            recorder.finish(result)
            recorder.check_seed()
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
    del result, stand, fake_args, fake_kwargs
    if any(ref() is not None for ref in made):
        gc.collect()
        if any(ref() is not None for ref in made):
            raise recorder.refuse(
                "it keeps a tensor otherwise than by return (in a list, an attribute, a cache)"
            )
    return program


_NOBODYS_SEED = 0x5EED0FA71A1


def _flags(settings: Settings | None) -> str:
    return "" if settings is None else repr((settings.flags, settings.casts))


def _plain(leaf: Any) -> Any:
    """A leaf of arguments as something that compares: 1, 1.0 and True are not the same."""
    return leaf if isinstance(leaf, Ref) else (type(leaf), str(leaf))
