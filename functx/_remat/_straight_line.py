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

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_operators
from functx._remat._arguments import SIMPLE
from functx._remat._step import Kind, kind_of
from functx._torch_memory import Memories, place_of, storage_and_key

FILE = "<functx: a pullback>"
_INDEX = torch.ops.aten.index.Tensor
_ADD, _ADD_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_CLONE = torch.ops.aten.clone.default
_LIFT = torch.ops.aten.lift_fresh.default
_SHORT = 256  # entries of a tensor that is written out
_INLINE = frozenset({int, bool, type(None)})

Code = Callable[[list[Tensor]], "list[Tensor | None]"]
"""From tensors, of which it empties the list, to gradients."""


class _Line:
    """One operation.

    Attributes:
        kind: what is known of the operator.
        args: its arguments; tensors as `_Cell`.
        kwargs: likewise.
        cells: its results, in the order in which they are given.
        single: whether it gives one tensor, and no list of them.
        storage: the memory that it writes to.
    """

    __slots__ = ("args", "cells", "kind", "kwargs", "single", "storage")

    def __init__(self, kind: Kind, args: Any, kwargs: Any) -> None:
        self.kind = kind
        self.args = args
        self.kwargs = kwargs
        self.cells: list[int | None] = []
        self.single = True
        self.storage: int | None = None

    def reads(self) -> Iterator[int]:
        """The tensors among its arguments."""
        return _cells_in((self.args, self.kwargs))


class _Cell:
    """A tensor, by its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Literal:
    """A tensor that Python makes of numbers, which have been compared."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value.clone()


class _Unknown(Exception):
    """A tensor was made unseen."""


class Recorder(_torch.TorchDispatchMode):
    """Writes down what runs.

    Args:
        given: the tensors that are known, none of which may be written to.
        kept: how many of them, the first ones, somebody keeps: they may be no results.
        usual: whether surroundings are those in which the code is going to run.
        literals: whether tensors that Python makes are made of numbers, which have been compared.

    Attributes:
        size: how many operations the code has.
    """

    size = 0

    def __init__(
        self,
        given: Sequence[Tensor],
        kept: int,
        usual: Callable[[], bool],
        literals: bool = True,
    ) -> None:
        super().__init__()
        self._literals = literals
        self._given = len(given)
        self._usual = usual
        self._memories = Memories()  # so that no address is another one's later
        self._storages: list[int] = []
        self._layouts: list[Any] = []
        self._cells: dict[Any, int] = {}
        self._lines: list[_Line] = []
        self._fits = True
        for t in given:
            self._new(t)
        self._foreign = {*self._storages}
        self._of_kept = {*self._storages[:kept]}

    def _new(self, t: Tensor) -> int:
        memory, storage = storage_and_key(t)
        self._memories.add(memory, storage)
        number = len(self._storages)
        place = place_of(t)
        self._storages.append(storage)
        self._layouts.append((memory.nbytes() == t.nbytes, *place[2:]))
        self._cells[place] = number
        return number

    def _known(self, t: Tensor) -> int | None:
        return self._cells.get(place_of(t))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        kind = kind_of(func)
        args, kwargs = _torch_operators.callable_arguments(func, args, kwargs or {})
        line = self._line(kind, args, kwargs) if self._fits else None
        if line is not None and kind.draws:  # it may: a fused attention without dropout does not
            before = _states()
            out = kind.run(*args, **kwargs)
            self._fits = all(map(torch.equal, before, _states()))
        else:
            out = kind.run(*args, **kwargs)
        if line is not None:
            try:
                self._note(line, out)
            except (RuntimeError, NotImplementedError):  # a result without memory
                self._fits = False
        return out

    def _line(self, kind: Kind, args: Any, kwargs: Any) -> _Line | None:
        """The operation, before it runs; ``None`` if it does not count."""
        try:
            line = _Line(kind, self._template(args), self._template(kwargs))
        except _Unknown:
            if self._literals and kind.func is _LIFT and args[0].numel() <= _SHORT:
                return _Line(kind_of(_CLONE), [_Literal(args[0])], {})
            if not kind.opaque and kind.writes:
                for t in _torch_operators.arguments_written(kind.func, args, kwargs):
                    self._lost(t)
            return None
        except (RuntimeError, NotImplementedError):  # sparse, say
            self._fits = False
            return None
        writes = False
        if kind.changes_view and kind.view:  # for the code, it is another tensor
            line.kind = kind_of(_torch_operators.out_of_place(kind.func))
        elif kind.changes_view or kind.opaque:
            self._fits = False
        elif kind.writes and not _torch_operators.reads_statistics(kind.func, args, kwargs):
            writes = self._fits = _writes_first(kind, args, kwargs)
        if not (self._fits and (kind.skippable or _takes(kind.func, args)) and self._usual()):
            self._fits = False
            return None
        if writes:
            line.storage = self._storages[next(line.reads())]
            self._fits = line.storage not in self._foreign
        return line

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
            return _Cell(number)
        if kind is list or kind is tuple:
            return [self._template(x) for x in tree]
        if kind is dict:
            return {key: self._template(x) for key, x in tree.items()}
        if isinstance(tree, torch.Size):
            return [*tree]
        if kind not in SIMPLE:
            raise RuntimeError(f"{kind} is no literal")
        return tree

    def _note(self, line: _Line, out: Any) -> None:
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
        return _written(lines, self._given, numbers)

    def _add_in_place(self, lines: Sequence[_Line], results: Iterable[int | None]) -> None:
        """Sums go where torch's engine has them: into one of two, if nobody reads that any more."""
        there = {n for n in results if n is not None}
        for line in reversed(lines):
            args = line.args
            if line.kind.func is _ADD and not line.kwargs and all(type(a) is _Cell for a in args):
                taken = self._foreign | {self._storages[n] for n in there.difference(line.cells)}
                for a, b in (args, args[::-1]):
                    goes = self._storages[a.number] not in taken | {self._storages[b.number]}
                    # All of its memory, or what is left of it would stay.
                    goes = goes and self._layouts[a.number][0]
                    if goes and self._layouts[a.number] == self._layouts[line.cells[0] or 0]:
                        line.kind, line.args = kind_of(_ADD_), [a, b]
                        break
            there.update(line.reads())

    def _live(self, results: Iterable[int | None]) -> list[_Line]:
        """The operations that results come from."""
        cells = {n for n in results if n is not None}
        storages = {self._storages[n] for n in cells}
        live = []
        for line in reversed(self._lines):
            if line.storage in storages or not cells.isdisjoint(line.cells):
                live.append(line)
                for n in line.reads():
                    cells.add(n)
                    storages.add(self._storages[n])
        return live[::-1]


def _writes_first(kind: Kind, args: Any, kwargs: Any) -> bool:
    """Whether all that it writes to is its first argument, a tensor."""
    written = _torch_operators.arguments_written(kind.func, args, kwargs)
    return (
        kind.in_place
        and len(written) == 1
        and written[0] is args[0]
        and isinstance(args[0], Tensor)
    )


def _takes(func: Any, args: Any) -> bool:
    """Whether it is an indexing whose indices are numbers: by a mask, values decide the shape."""
    masks = (torch.bool, torch.uint8)
    return func is _INDEX and all(t is None or t.dtype not in masks for t in args[1])


def _states() -> list[Tensor]:
    """Of all generators that an operation may draw from without being given one."""
    on_gpu = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [generator.get_state() for generator in (torch.default_generator, *on_gpu)]


def _cells_in(tree: Any) -> Iterator[int]:
    if isinstance(tree, _Cell):
        yield tree.number
    elif isinstance(tree, (list, tuple)):
        for x in tree:
            yield from _cells_in(x)
    elif isinstance(tree, dict):
        yield from _cells_in([*tree.values()])


def _written(lines: Sequence[_Line], given: int, results: Sequence[int | None]) -> Code:
    """A function of Python."""
    there = {n for n in results if n is not None}  # what is read from here on
    names: dict[str, Any] = {}

    def argument(x: Any) -> str:
        if isinstance(x, _Cell):
            return f"t{x.number}"
        if isinstance(x, list):
            return f"[{', '.join(map(argument, x))}]"
        if type(x) in _INLINE:
            return repr(x)
        names[name := f"k{len(names)}"] = x.value if isinstance(x, _Literal) else x
        return name

    body: list[str] = []
    for line in reversed(lines):
        last = {*line.reads()} - there
        last |= {n for n in line.cells if n is not None} - there
        there |= last
        names[run := f"f{len(names)}"] = line.kind.run
        args = [*map(argument, line.args)]
        args += [f"{key}={argument(x)}" for key, x in line.kwargs.items()]
        cells = [f"t{n}" if n is not None else "_" for n in line.cells]
        target = cells[0] if line.single else f"[{', '.join(cells)}]"
        if last:
            body.append(f"del {', '.join(f't{n}' for n in sorted(last))}")
        body.append(f"{target} = {run}({', '.join(args)})")
    if unread := [f"t{n}" for n in range(given) if n not in there]:
        body.append(f"del {', '.join(unread)}")
    outs = ", ".join("None" if n is None else f"t{n}" for n in results)
    source = "\n    ".join(
        [
            "def pull_back(given):",
            f"[{', '.join(f't{n}' for n in range(given))}] = given",
            "given.clear()",
            *reversed(body),
            f"return [{outs}]",
        ]
    )
    exec(compile(source, FILE, "exec"), names)
    code: Code = names["pull_back"]
    return code
