"""A function as the list of operations that it runs, cut into blocks that can be regions.

The function is run on fake tensors of the arguments' shapes, at each call anew, so that what is run
afterwards is never stale: flags, training mode, closures and shapes are those of this call. What
can't be found out that way (control flow that depends on values, custom Functions, transforms
inside) is an error; nothing is guessed.

NOTE [cuts]
Between any two operations the tensors that are still read go from one block to the next. Memory
that an operation writes to in place is not to be split between regions: there is no cut between
its first use and the last write.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functx import _tree
from functx._flags import Flags

# A block for each operation up to so many; more are taken together.
MOST_BLOCKS = 32


@dataclass(frozen=True)
class Ref:
    """A tensor in the arguments of an operation: an earlier value, or one from outside."""

    number: int
    outside: bool = False


@dataclass
class Operation:
    """One call: the function, its arguments as leaves, the values it gives, the grad mode.

    Attributes:
        flags: settings that it ran under, where the program had changed them.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    gives: list[int]
    grad: bool
    flags: Flags | None = None


class Program:
    """What a function ran, as `record` saw it.

    Attributes:
        operations: in order.
        takes: how many tensors go in: values 0, 1, ...
        outside: tensors that it reached otherwise than through its arguments.
        cuts: where it may be cut, by the number of operations before; ends included.
        layouts: shape, dtype and device of each value.
        flags: settings that it began under.
    """

    def __init__(self, takes: int) -> None:
        self.operations: list[Operation] = []
        self.takes = takes
        self.outside: list[Tensor] = []
        self.cuts: list[int] = []
        self.layouts: list[Any] = []
        self.results: list[Any] = []  # references, or what is no tensor
        self.spec: Any = None
        self.flags = Flags.now()

    def without_tensors(self) -> Program:
        """The same, with nothing in place of the tensors from outside."""
        program = copy.copy(self)
        program.outside = []
        return program

    def signature(self) -> tuple[Any, ...]:
        """Equal for programs that cost the same."""
        values = tuple(self.layouts)  # `1` and `1.0` are equal, what is made with them is not
        outside = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in self.outside)
        return (
            values,
            self.takes,
            outside,
            tuple(
                (o.function, o.grad, str(o.flags), tuple(map(_plain, o.leaves)))
                for o in self.operations
            ),
            str(self.flags),
            tuple(map(_plain, self.results)),  # what is returned stays
        )

    def blocks(self, outside: Sequence[Tensor] | None = None) -> list[Segment]:
        """The program in blocks; `finish` makes the result of what the last one returns.

        Args:
            outside: tensors to use for those from outside.
        """
        outside = self.outside if outside is None else outside
        last: dict[int, int] = {}
        for at, operation in enumerate(self.operations):
            for leaf in operation.leaves:
                if isinstance(leaf, Ref) and not leaf.outside:
                    last[leaf.number] = at
        end = len(self.operations)
        for result in self.results:
            if isinstance(result, Ref) and not result.outside:
                last[result.number] = end
        born = dict.fromkeys(range(self.takes), -1)
        for at, operation in enumerate(self.operations):
            for number in operation.gives:
                born.setdefault(number, at)

        def live(cut: int) -> list[int]:
            return [n for n, at in born.items() if at < cut <= last.get(n, -1)]

        cuts = self._chosen(live)
        return [
            Segment(self.operations[a:b], live(b), outside) for a, b in itertools.pairwise(cuts)
        ]

    def _chosen(self, live: Callable[[int], list[int]]) -> list[int]:
        """Cuts for blocks of about as many operations each, where least is handed on."""
        cuts, n = self.cuts, len(self.operations)
        if len(cuts) <= MOST_BLOCKS + 1:
            return cuts
        chosen = [0]
        for i in range(1, MOST_BLOCKS):
            middle, reach = i * n / MOST_BLOCKS, n / MOST_BLOCKS / 2
            near = [c for c in cuts if abs(c - middle) <= reach and chosen[-1] < c < n]
            if near:
                chosen.append(min(near, key=lambda c: (self._bytes(live(c)), abs(c - middle))))
        return [*chosen, n]

    def _bytes(self, numbers: Sequence[int]) -> int:
        return sum(self.layouts[n][0].numel() * self.layouts[n][1].itemsize for n in numbers)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """What the function returns for such arguments."""
        state = dict(enumerate(inputs))
        for block in self.blocks():
            state = block(state)
        return self.finish(state)

    @contextmanager
    def undrawn(self) -> Iterator[None]:
        """Put the generators that operations are given back to the states they have now."""
        given = {leaf for o in self.operations for leaf in o.leaves if _is_generator(leaf)}
        before = [(generator, generator.get_state()) for generator in given]
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)

    def finish(self, values: dict[int, Tensor]) -> Any:
        """The result of the function, from the values that the last block gives."""
        leaves = [
            r
            if not isinstance(r, Ref)
            else self.outside[r.number]
            if r.outside
            else values[r.number]
            for r in self.results
        ]
        return _tree.unflatten(self.spec, leaves)


class Segment:
    """Some operations of a program, as a function of values by number, to values by number.

    Attributes:
        reads: the values that it needs; others just pass.
        gives: the values that are there afterwards.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        gives: Sequence[int],
        outside: Sequence[Tensor],
    ) -> None:
        self._operations = operations
        self._outside = outside
        self.gives = sorted(gives)
        names = [getattr(o.function, "__name__", "?") for o in operations]
        self.__qualname__ = " ".join(names[:6]) + (" ..." if len(names) > 6 else "")
        last: dict[int, int] = {}
        made: set[int] = set()
        self.reads: set[int] = set()
        for at, operation in enumerate(operations):
            for leaf in operation.leaves:
                if isinstance(leaf, Ref) and not leaf.outside:
                    last[leaf.number] = at
                    self.reads |= {leaf.number} - made
            for number in operation.gives:
                last[number] = at
                made.add(number)
        kept = set(self.gives)
        self._dead = [
            [n for n, end in last.items() if end == at and n not in kept]
            for at in range(len(operations))
        ]

    def __call__(self, state: dict[int, Tensor]) -> dict[int, Tensor]:
        values = dict(state)
        del state
        together = itertools.groupby(zip(self._operations, self._dead), lambda pair: pair[0].flags)
        for flags, pairs in together:
            with nullcontext() if flags is None else flags.entered():
                for operation, dead in pairs:
                    outs = self._run(operation, values)
                    values.update(zip(operation.gives, outs, strict=True))
                    del outs
                    for number in dead:
                        values.pop(number, None)
        return {n: values[n] for n in self.gives if n in values}

    def _run(self, operation: Operation, values: dict[int, Tensor]) -> list[Tensor]:
        leaves = [
            leaf
            if not isinstance(leaf, Ref)
            else self._outside[leaf.number]
            if leaf.outside
            else values[leaf.number]
            for leaf in operation.leaves
        ]
        args, kwargs = _tree.unflatten(operation.spec, leaves)
        if operation.grad == torch.is_grad_enabled():
            out = operation.function(*args, **kwargs)
        else:
            with torch.set_grad_enabled(operation.grad):
                out = operation.function(*args, **kwargs)
        return [t for t in _tree.leaves(out) if isinstance(t, Tensor)]


def _is_generator(leaf: Any) -> bool:
    return isinstance(leaf, torch.Generator)


def _plain(leaf: Any) -> Any:
    """A leaf of arguments as something that compares."""
    if isinstance(leaf, (Ref, int, float, complex, str, bool, type(None), torch.dtype)):
        return leaf
    return str(leaf)
