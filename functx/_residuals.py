"""Residuals as values: what a pullback keeps, how large it is, where it is from; and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Residual:
    """One piece of memory that a pullback keeps.

    Attributes:
        shape: of the value that is in it.
        dtype: likewise.
        device: where the value belongs, or is, if it is in host memory.
        nbytes: bytes of memory that are kept. Of what the function made, all that the value is a
            part of; of what was there before, as many as the tensor shows.
        kind: ``"argument"``, ``"parameter"``, ``"buffer"``, ``"constant"``, ``"named"`` (by
            `functx.checkpoint_name`) or ``"output"`` (of an operation, without a name).
        source: where it comes from, in words.
        names: that `functx.checkpoint_name` gave it.
        operation: that made it, such as ``"aten.mm"``; ``""`` if it was there before.
        file: of the line that called the operation, or first read what was there before.
        line: its number; 0 if none is known.
        function: what the line is in.
        module: the path of the ``nn.Module`` that was running, from the outermost.
        flops: that computing it again would take, from what else is kept and what was there before;
            0 if it was there before. Products, convolutions and attention count by torch's
            formulas, anything else one for each element of a result.
        on_host: whether it was moved to host memory.
        is_result: whether it is (a part of) what the function returned.
    """

    shape: tuple[int, ...]
    dtype: Any
    device: Any
    nbytes: int
    kind: str
    source: str
    names: tuple[str, ...] = ()
    operation: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    module: str = ""
    flops: int = 0
    on_host: bool = False
    is_result: bool = False

    @property
    def made(self) -> bool:
        """Whether the function made it."""
        return bool(self.operation)

    def __str__(self) -> str:
        return f"{_dtype(self.dtype)}{list(self.shape)} {self.source}"


class Residuals(tuple[Residual, ...]):
    """All that a pullback keeps, in the order in which it came about; prints as a table.

    Sizes are in bytes.

    Example:
        >>> import torch, functx
        >>> f = lambda x: torch.sin(torch.sin(x)).sum()
        >>> kept = functx.saved_residuals(f, torch.ones(1000))
        >>> [r.kind for r in kept], kept.nbytes, kept.kept
        (['argument', 'output'], 8000, 4000)
    """

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Of everything."""
        return sum(r.nbytes for r in self)

    @property
    def kept(self) -> int:
        """Of what the function made and did not return, as `functx.memory.Profile.kept`."""
        return sum(r.nbytes for r in self if r.made and not r.is_result)

    @property
    def on_host(self) -> int:
        """Of what was moved to host memory."""
        return sum(r.nbytes for r in self if r.on_host)

    @property
    def flops(self) -> int:
        """That computing each of them again would take, one by one."""
        return sum(r.flops for r in self)

    def compare(self, other: Residuals, labels: tuple[str, str] = ("before", "after")) -> str:
        """A table of this and of what another function keeps, a line for each source.

        Args:
            other: residuals of the same computation, under another policy.
            labels: what to call the two.

        Returns:
            The table: how many values of a source, and their bytes, in each.

        Example:
            >>> import torch, functx
            >>> f = lambda x: torch.sin(functx.checkpoint_name(torch.sin(x), "a")).sum()
            >>> x = torch.ones(1000)
            >>> before = functx.saved_residuals(f, x)
            >>> after = functx.saved_residuals(functx.remat(f), x)
            >>> before.kept, after.kept
            (4000, 0)
        """
        return side_by_side(dict(zip(labels, (self, other), strict=True)))

    def __str__(self) -> str:
        head = ("shape", "dtype", "bytes", "FLOPs again", "from")
        rows = [
            (
                str(r.shape),
                _dtype(r.dtype),
                f"{r.nbytes:,}",
                f"{r.flops:,}" if r.made else "-",
                r.source,
            )
            for r in self
        ]
        n = len(self)
        total = f"{n} value{'' if n == 1 else 's'}, {self.kept:,} bytes of them made for the "
        total += "pullback alone"
        if self.on_host:
            total += f", {self.on_host:,} in host memory"
        rows.append(("total", "", f"{self.nbytes:,}", f"{self.flops:,}", total))
        return _table(head, rows, "<<>><")

    def __repr__(self) -> str:
        return f"<{len(self)} residuals, {self.nbytes:,} bytes, {self.kept:,} of them made>"


def side_by_side(found: dict[str, Residuals]) -> str:
    """A table of what several functions keep, a line for each source, a column for each."""
    sources: dict[tuple[str, tuple[int, ...], Any], Residual] = {}
    counts: dict[str, Counter[Any]] = {}
    sizes: dict[str, Counter[Any]] = {}
    for label, residuals in found.items():
        counts[label], sizes[label] = Counter(), Counter()
        for r in residuals:
            key = (r.source.removesuffix(ON_HOST), r.shape, r.dtype)
            sources.setdefault(key, r)
            counts[label][key] += 1
            sizes[label][key] += r.nbytes
    order = sorted(sources, key=lambda key: sources[key].made)
    rows = []
    for key in order:
        cells = [
            (f"{counts[label][key]} x " if counts[label][key] > 1 else "")
            + (f"{sizes[label][key] // counts[label][key]:,}" if counts[label][key] else "-")
            for label in found
        ]
        rows.append((str(key[1]), _dtype(key[2]), *cells, key[0]))
    totals: list[tuple[str, Callable[[Residuals], int]]] = [
        ("bytes", lambda r: r.nbytes),
        ("of them made for the pullback alone", lambda r: r.kept),
        ("in host memory", lambda r: r.on_host),
        ("FLOPs to compute each again", lambda r: r.flops),
    ]
    for text, of in totals:
        if any(map(of, found.values())):
            rows.append(("total", "", *(f"{of(r):,}" for r in found.values()), text))
    return _table(("shape", "dtype", *found, "from"), rows, "<<" + ">" * len(found) + "<")


ON_HOST = ", in host memory"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], aligned: str) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, aligned, widths)).rstrip()
        for row in (head, *rows)
    )
