"""Residuals as values: what a pullback keeps, how large it is, where it is from; and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

ON_HOST = ", in host memory"


class Value(NamedTuple):
    """The shape and dtype of a tensor; prints as ``float32[2,3]``."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(map(str, self.shape))}]"


class Residual(NamedTuple):
    """One piece of memory that a pullback keeps; the first two fields are those of JAX.

    Attributes:
        value: the shape and dtype of what is in it.
        source: where it comes from, in words.
        nbytes: bytes of memory that are kept. Of what the function made, all that the value is a
            part of; of what was there before, as many as the tensor shows.
        kind: ``"argument"``, ``"parameter"``, ``"buffer"``, ``"constant"``, ``"named"`` (by
            `functx.checkpoint_name`) or ``"output"`` (of an operation, without a name).
        names: that `functx.checkpoint_name` gave it.
        operation: that made it, such as ``"aten.mm"``; ``""`` if it was there before.
        file: of the line that called the operation, or first read what was there before.
        line: its number; 0 if none is known.
        function: what the line is in.
        module: the path of the ``nn.Module`` that was running, from the outermost.
        on_host: whether it was moved to host memory.
        is_result: whether it is (a part of) what the function returned.
    """

    value: Value
    source: str
    nbytes: int
    kind: str
    names: tuple[str, ...] = ()
    operation: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    module: str = ""
    on_host: bool = False
    is_result: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the value."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """Of the value."""
        return self.value.dtype

    @property
    def made(self) -> bool:
        """Whether the function made it."""
        return bool(self.operation)

    def __str__(self) -> str:
        return f"{self.value} {self.source}"


class Residuals(list[Residual]):
    """All that a pullback keeps, in the order in which it came about; prints as a table.

    Example:
        >>> import torch, functx
        >>> f = lambda x: torch.sin(torch.sin(x)).sum()
        >>> kept = functx.saved_residuals(f, torch.ones(1000))
        >>> [r.kind for r in kept], kept.nbytes, kept.kept
        (['argument', 'output'], 8000, 4000)
    """

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return sum(r.nbytes for r in self)

    @property
    def kept(self) -> int:
        """Bytes that the function made and did not return, as `functx.memory.Profile.kept`."""
        return sum(r.nbytes for r in self if r.made and not r.is_result)

    def __str__(self) -> str:
        rows = [(str(r.value), f"{r.nbytes:,}", r.source) for r in self]
        total = f"total, {self.kept:,} bytes of them made for the pullback alone"
        return _table(("value", "bytes", "from"), [*rows, ("", f"{self.nbytes:,}", total)])


def side_by_side(found: dict[str, Residuals]) -> str:
    """A table of what several functions keep, a line for each source, a column for each."""
    made: dict[tuple[str, str], bool] = {}
    counts: dict[str, Counter[Any]] = {label: Counter() for label in found}
    sizes: dict[str, Counter[Any]] = {label: Counter() for label in found}
    for label, residuals in found.items():
        for r in residuals:
            key = str(r.value), r.source.removesuffix(ON_HOST)
            made.setdefault(key, r.made)
            counts[label][key] += 1
            sizes[label][key] += r.nbytes
    rows = []
    for key in sorted(made, key=made.__getitem__):
        cells = [
            (f"{n} x " if n > 1 else "") + (f"{sizes[label][key] // n:,}" if n else "-")
            for label in found
            for n in [counts[label][key]]
        ]
        rows.append((key[0], *cells, key[1]))
    rows.append(("", *(f"{r.nbytes:,}" for r in found.values()), "total"))
    kept = [f"{r.kept:,}" for r in found.values()]
    rows.append(("", *kept, "of them made for the pullback alone"))
    return _table(("value", *found, "from"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first and the last are text, numbers between them stand to the right."""
    aligned = "<" + ">" * (len(head) - 2) + "<"
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, aligned, widths)).rstrip()
        for row in (head, *rows)
    )
