"""Lines of straight-line code, and the function of Python that they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from functx._remat._checksum import checksum
from functx._remat._step import Kind

FILE = "<functx: a pullback>"
_INLINE = frozenset({int, bool, type(None)})

Code = Callable[[list[Tensor]], "list[Tensor | None]"]
"""From tensors, of which it empties the list, to gradients."""

Trial = Callable[[list[Tensor]], "list[int | None]"]
"""The same, to their checksums: each gradient is looked at when it is there, and goes."""


class Line:
    """One operation.

    Attributes:
        kind: what is known of the operator.
        args: its arguments; tensors as `Cell`.
        kwargs: likewise.
        cells: its results, in the order in which they are given.
        draws: whether it may move a generator on, and has to run.
        single: whether it gives one tensor, and no list of them.
        storages: the memory that it writes to.
    """

    __slots__ = ("args", "cells", "draws", "kind", "kwargs", "single", "storages")

    def __init__(self, kind: Kind, args: Any, kwargs: Any) -> None:
        self.kind = kind
        self.args = args
        self.kwargs = kwargs
        self.cells: list[int | None] = []
        self.draws = False
        self.single = True
        self.storages: set[int] = set()

    def reads(self) -> Iterator[int]:
        """The tensors among its arguments."""
        return cells_in((self.args, self.kwargs))


class Cell:
    """A tensor, by its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Literal:
    """A tensor that Python makes of numbers, which have been compared."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value.clone()


def written(
    lines: Sequence[Line],
    given: int,
    results: Sequence[int | None],
    ready: Sequence[set[int]] = (),
) -> Any:
    """A function of Python: a `Code`, or a `Trial` if it is told when each result is ready."""
    there = set() if ready else {n for n in results if n is not None}  # what is read from here on
    names: dict[str, Any] = {"look_at": lean_checksum}

    def argument(x: Any) -> str:
        if isinstance(x, Cell):
            return f"t{x.number}"
        if isinstance(x, list):
            return f"[{', '.join(map(argument, x))}]"
        if type(x) in _INLINE:
            return repr(x)
        names[name := f"k{len(names)}"] = x.value if isinstance(x, Literal) else x
        return name

    body: list[str] = []

    def until_here(*those: Iterable[int], looked_at: Iterable[int] = ()) -> None:
        last = {*looked_at}.union(*those) - there
        there.update(last)
        if last:
            body.append(f"del {', '.join(f't{n}' for n in sorted(last))}")
        body.extend(f"c{n} = look_at(t{n})" for n in looked_at)

    for i in range(len(lines) - 1, -1, -1):
        line = lines[i]
        made = [n for n in line.cells if n is not None]
        until_here(line.reads(), made, looked_at=ready[i] if ready else ())
        names[run := f"f{len(names)}"] = line.kind.run
        args = [*map(argument, line.args)]
        args += [f"{key}={argument(x)}" for key, x in line.kwargs.items()]
        cells = [f"t{n}" if n is not None else "_" for n in line.cells]
        target = cells[0] if line.single else f"[{', '.join(cells)}]"
        body.append(f"{target} = {run}({', '.join(args)})")
    until_here(range(given), looked_at=ready[-1] if ready else ())
    prefix = "c" if ready else "t"
    outs = ", ".join("None" if n is None else f"{prefix}{n}" for n in results)
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
    return names["pull_back"]


def lean_checksum(t: Tensor) -> int | None:
    """Of the tensor inside of all wrappers."""
    return checksum(t, lean=True)


def cells_in(tree: Any) -> Iterator[int]:
    if isinstance(tree, Cell):
        yield tree.number
    elif isinstance(tree, (list, tuple)):
        for x in tree:
            yield from cells_in(x)
    elif isinstance(tree, dict):
        yield from cells_in([*tree.values()])
