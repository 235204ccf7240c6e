"""The ATen operations of a pullback, written down once: straight-line code that does them again.

NOTE [straight-line code]
A dispatch mode sees what a replay and its tape run, below autograd and all transforms. Where each
tensor comes from is told by its memory and layout: nothing of Python has to be known. What was
made unseen (memory that stands for an input that is not kept) is not known, and neither is what is
computed from it; no gradient may be. What no gradient comes from is left out.

The code holds no tensors but short ones that the body makes of numbers, and each that it makes
goes with its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_compiler, _torch_operators
from functx._remat._arguments import SIMPLE
from functx._remat._lines import Cell, Code, Line, Literal, Trial, written
from functx._remat._room import Needs, needs
from functx._remat._step import Kind, kind_of
from functx._torch_memory import Memories, place_of, storage_and_key

_INDEX = torch.ops.aten.index.Tensor
_ADD, _ADD_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_CLONE = torch.ops.aten.clone.default
_LIFT = torch.ops.aten.lift_fresh.default
_SHORT = 256  # entries of a tensor that is written out


class _Unknown(Exception):
    """A tensor was made unseen."""


class Recorder(_torch.TorchDispatchMode):
    """Writes down what runs.

    Args:
        given: the tensors that are known, none of which may be written to.
        kept: how many of them, the first ones, somebody keeps: they may be no results.
        passing: which of these may go nevertheless.
        usual: whether surroundings are those in which the code is going to run.
        literals: whether tensors that Python makes are made of numbers, which have been compared.
        drawn: devices whose default generators are set as they were before the code runs.

    Attributes:
        needs: what the code needs.
        size: how many operations it has.
        trial: what gives checksums of the results instead.
    """

    only_observes = True
    supports_higher_order_operators = True
    _should_skip_dynamo = _torch.never_skip_dynamo
    needs: Needs | None = None
    size = 0
    trial: Trial | None = None

    def __init__(
        self,
        given: Sequence[Tensor],
        kept: int,
        usual: Callable[[], bool],
        literals: bool = True,
        passing: Sequence[int] = (),
        drawn: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self._drawn = drawn
        self._literals = literals
        self._given = len(given)
        self._usual = usual
        self._memories = Memories()  # so that no address is another one's later
        self._storages: list[int] = []
        self._sizes: dict[int, int] = {}
        self._layouts: list[Any] = []
        self._cells: dict[Any, int] = {}
        self._lines: list[Line] = []
        self._fits = True
        for t in given:
            self._new(t)
        self._foreign = {*self._storages}
        self._of_kept = {*self._storages[:kept]}
        self._going = {*self._storages[kept:], *(self._storages[i] for i in passing)}

    def _new(self, t: Tensor) -> int:
        memory, storage = storage_and_key(t)
        self._memories.add(memory, storage)
        number = len(self._storages)
        place = place_of(t)
        self._storages.append(storage)
        self._sizes[storage] = memory.nbytes()
        self._layouts.append((memory.nbytes() == t.nbytes, *place[2:]))
        self._cells[place] = number
        return number

    def _known(self, t: Tensor) -> int | None:
        return self._cells.get(place_of(t))

    @_torch_compiler.uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        kind = kind_of(func)
        if kind.opaque:
            self._fits = False
            return func(*args, **kwargs or {})
        args, kwargs = _torch_operators.callable_arguments(func, args, kwargs or {})
        line = None
        try:
            line = self._line(kind, args, kwargs) if self._fits else None
        except Exception:  # what runs is a replay: no concern of its own
            self._fits = False
        if self._fits and kind.draws:  # it may: a fused attention without dropout does not
            before = _states()
            out = kind.run(*args, **kwargs)
            self._draws(line, [d for d, now in _states().items() if not now.equal(before[d])])
        else:
            out = kind.run(*args, **kwargs)
        if line is not None:
            try:
                self._note(line, out)
            except Exception:  # a result without memory, say
                self._fits = False
        return out

    def _line(self, kind: Kind, args: Any, kwargs: Any) -> Line | None:
        """The operation, before it runs; ``None`` if it does not count."""
        try:
            line = Line(kind, self._template(args), self._template(kwargs))
        except _Unknown:
            if self._literals and kind.func is _LIFT and args[0].numel() <= _SHORT:
                return Line(kind_of(_CLONE), [Literal(args[0])], {})
            if kind.writes:
                for t in _torch_operators.arguments_written(kind.func, args, kwargs):
                    self._lost(t)
            return None
        written: list[Any] = []
        if kind.changes_view and kind.view:  # for the code, it is another tensor
            line.kind = kind_of(_torch_operators.out_of_place(kind.func))
        elif kind.changes_view:
            self._fits = False
        elif kind.writes and not _torch_operators.reads_statistics(kind.func, args, kwargs):
            written = _torch_operators.arguments_written(kind.func, args, kwargs)
            written = [t for t in written if t is not None]
            self._fits = _torch_operators.writes_statistics(kind.func) or (
                kind.in_place and len(written) == 1 and written[0] is args[0]
            )
        if not (self._fits and (kind.skippable or _takes(kind.func, args)) and self._usual()):
            self._fits = False
            return None
        if written:
            line.storages = {storage_and_key(t)[1] for t in written}
            self._fits = line.storages.isdisjoint(self._foreign)
        return line

    def _draws(self, line: Line | None, moved: Sequence[Any]) -> None:
        """An operation that may draw has moved some generators on: the code has to run it as well.

        Also where it moved none: it may depend on values how much it draws (`poisson`).
        """
        self._fits = line is not None and all(d in self._drawn for d in moved)
        if line is not None:
            line.draws = True

    def _lost(self, t: Any) -> None:
        """Something unknown is written there."""
        if isinstance(t, Tensor):
            storage = storage_and_key(t)[1]
            self._fits = self._fits and storage not in self._foreign
            gone = [place for place, n in self._cells.items() if self._storages[n] == storage]
            for place in gone:
                del self._cells[place]

    def _template(self, tree: Any) -> Any:
        kind = type(tree)
        if isinstance(tree, Tensor):
            number = self._known(tree)
            if number is None:
                raise _Unknown
            return Cell(number)
        if kind is list or kind is tuple:
            return [self._template(x) for x in tree]
        if kind is dict:
            return {key: self._template(x) for key, x in tree.items()}
        if isinstance(tree, torch.Size):
            return [*tree]
        if kind not in SIMPLE:
            raise RuntimeError(f"{kind} is no literal")
        return tree

    def _note(self, line: Line, out: Any) -> None:
        if isinstance(out, Tensor):
            if self._known(out) is not None and not line.kind.writes:
                return  # a view that is there already
            line.cells = [self._new(out)]
        elif isinstance(out, (list, tuple)):
            line.single = False
            line.cells = [None if t is None else self._new(t) for t in out]
        elif line.kind.view:  # it only looks at shapes
            return
        else:
            self._fits = False
            return
        self._lines.append(line)

    def code(self, results: Sequence[Tensor | None]) -> Code | None:
        """What gives the same results from the same tensors; ``None`` if it can't be told."""
        numbers: list[int | None] = []
        for t in results if self._fits else ():
            number = None if t is None else self._known(t)
            if t is not None and (number is None or self._storages[number] in self._of_kept):
                return None
            numbers.append(number)
        if not self._fits:
            return None
        lines = self._live(numbers)
        self._add_in_place(lines, numbers)
        self.size = len(lines)
        ready = self._ready(lines, numbers)
        self.needs = self._needs(lines, numbers, ready)
        self.trial = written(lines, self._given, numbers, ready)
        code: Code = written(lines, self._given, numbers)
        return code

    def _ready(self, lines: Sequence[Line], results: Iterable[int | None]) -> list[set[int]]:
        """For each line, the results that no other changes when it has run; then all others."""
        rest = {n for n in results if n is not None}
        found: list[set[int]] = []
        for line in reversed(lines):
            found.append({n for n in rest if n in line.cells or self._storages[n] in line.storages})
            rest -= found[-1]
        return [*found[::-1], rest]

    def _needs(
        self, lines: Sequence[Line], results: Iterable[int | None], ready: Sequence[set[int]]
    ) -> Needs:
        memories = [*self._storages]
        for line in lines:
            if line.kind.func is _ADD_ and not line.storages:  # by `_add_in_place`
                memories[line.cells[0] or 0] = memories[line.args[0].number]

        def of(cells: Iterable[int | None]) -> set[int]:
            return {memories[n] for n in cells if n is not None}

        steps = [of([*line.reads(), *line.cells]) for line in lines]
        beside = [
            i for i, line in enumerate(lines) if _torch_operators.may_take_memory(line.kind.func)
        ]
        held = self._foreign - self._going
        return needs(steps, self._sizes, held, self._going, of(results), [*map(of, ready)], beside)

    def _add_in_place(self, lines: Sequence[Line], results: Iterable[int | None]) -> None:
        """Sums go where torch's engine has them: into one of two, if nobody reads that any more."""
        there = {n for n in results if n is not None}
        for line in reversed(lines):
            args = line.args
            if line.kind.func is _ADD and not line.kwargs and all(type(a) is Cell for a in args):
                taken = self._foreign | {self._storages[n] for n in there.difference(line.cells)}
                for a, b in (args, args[::-1]):
                    goes = self._storages[a.number] not in taken | {self._storages[b.number]}
                    # All of its memory, or what is left of it would stay.
                    goes = goes and self._layouts[a.number][0]
                    if goes and self._layouts[a.number] == self._layouts[line.cells[0] or 0]:
                        line.kind, line.args = kind_of(_ADD_), [a, b]
                        break
            there.update(line.reads())

    def _live(self, results: Iterable[int | None]) -> list[Line]:
        """The operations that results come from."""
        cells = {n for n in results if n is not None}
        storages = {self._storages[n] for n in cells}
        live = []
        for line in reversed(self._lines):
            if line.draws or not (
                storages.isdisjoint(line.storages) and cells.isdisjoint(line.cells)
            ):
                live.append(line)
                for n in line.reads():
                    cells.add(n)
                    storages.add(self._storages[n])
        return live[::-1]


def may_be_written(kind: Kind) -> bool:
    """Whether code may have an operation of some kind, as far as that is known beforehand."""
    return kind.opaque or kind.skippable or kind.func is _INDEX


def _takes(func: Any, args: Any) -> bool:
    """Whether it is an indexing whose indices are numbers: by a mask, values decide the shape."""
    masks = (torch.bool, torch.uint8)
    return func is _INDEX and all(t is None or t.dtype not in masks for t in args[1])


def _states() -> dict[Any, Tensor]:
    """Of all generators that an operation may draw from without being given one."""
    return {key: generator.get_state() for key, generator in _torch.default_generators()}
