"""The result of a cross-check, as an object that can be printed, saved and asserted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from functx._insight import Printed
from functx.compat._crosscheck.kept_bytes import Kept, RegionResiduals
from functx.compat._crosscheck.operations import Operation
from functx.compat._crosscheck.precision import Difference
from functx.compat._crosscheck.products import Products
from functx.compat._crosscheck.ways import COMPILED, EAGER, JAX, TRACED, Way

WAYS = (EAGER, TRACED, COMPILED, JAX)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>crosscheck {title}</title></head>
<body><pre>{text}</pre></body></html>
"""


@dataclass(frozen=True)
class Run:
    """The memory, time and products of one transform.

    Attributes:
        torch_peak: peak bytes of live storages in torch.
        xla_temp: temporary bytes of the compiled JAX program.
        torch_seconds: the time of the fastest run.
        jax_seconds: the same for the compiled JAX program.
        products: matrix products and convolutions, and how many of them are recomputed.
    """

    torch_peak: int | None
    xla_temp: int | None
    torch_seconds: float | None
    jax_seconds: float | None
    products: Products | None


@dataclass(frozen=True)
class Crosscheck(Printed):
    """The comparison of one function in torch and in JAX; prints as a table.

    Attributes:
        name: the name of the function.
        differences: the differences by transform: ``"value"``, ``"grad"``, ``"vmap(grad)"``, ...
        runs: memory, time and products by transform.
        kept_torch: the bytes that torch's pullback keeps at region boundaries; ``None`` if nothing
            was differentiated.
        kept_jax: the bytes that JAX's pullback keeps there.
        first: the first operation that differs, if one was found.
        searched: whether such an operation was searched for.
        environment: versions and devices.
        ways: with ``compiled``, the figures of each transform in eager, traced, compiled by
            `functx.jit`, and in JAX.
    """

    name: str
    differences: dict[str, Difference]
    runs: dict[str, Run]
    kept_torch: Kept | None
    kept_jax: Kept | None
    first: Operation | None = None
    searched: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    ways: dict[str, dict[str, Way]] = field(default_factory=dict)

    @property
    def kept_equal(self) -> bool:
        """Whether both frameworks keep equally many bytes of activations at equally many regions.

        Arguments may differ, since they are alive anyway: JAX drops those that no derivative reads
        (such as a last bias). Integers that no derivative reads may differ too (such as positions),
        and so may an array that passes through a region unread, on its way to another region.
        """
        a, b = self.kept_torch, self.kept_jax
        if a is None or b is None:
            return a is b
        return a.regions == b.regions and _alike(a, b)

    @property
    def agrees(self) -> bool:
        """Whether all differences are allowed, and the kept bytes are equal."""
        return not self.problems()

    def problems(self, rtol: float | None = None, *, kept: bool = True) -> list[str]:
        """The disagreements between the frameworks, each as a sentence.

        Args:
            rtol: the largest difference allowed, relative to the largest magnitude of a tensor; by
                default that of the comparison.
            kept: whether the kept bytes must be equal.

        Returns:
            The sentences; an empty list if torch and JAX agree.
        """
        found = []
        for what, d in self.differences.items():
            allowed = d.allowed if rtol is None else rtol
            if d.agrees if rtol is None else d.relative <= rtol:
                continue
            found.append(f"the {what} differs at {d.where} ({d.dtype}){_how_far(d, allowed)}")
        if found and self.first is not None:
            found.append(f"first: {self.first}")
        elif found and self.searched:
            found.append(
                "first: no operation differs by itself, in its values or first derivatives. Other"
                " possible causes are second derivatives, batching, places where derivatives stop,"
                " XLA's fusion of several operations, and state that changes from call to call"
            )
        for what, ways in self.ways.items():
            for name in (TRACED, COMPILED):
                way = ways[name].difference
                if way is None or (way.agrees if rtol is None else way.relative <= rtol):
                    continue
                allowed = way.allowed if rtol is None else rtol
                found.append(
                    f"the {what} of torch in eager and {_AS[name]} differ at {way.where}"
                    f" ({way.dtype}){_how_far(way, allowed, name)}"
                )
        a, b = self.kept_torch, self.kept_jax
        if kept and a is not None and b is not None and not self.kept_equal:
            where = [f" (first at {name}: {x} and {y})" for name, x, y in _differing(a, b)]
            found.append(
                f"bytes kept at region boundaries differ: torch {_in_words(a)}, JAX {_in_words(b)}"
                f"{''.join(where[:1])}; the boundaries are not at the same places"
            )
        return found

    def assert_agrees(
        self, rtol: float | None = None, *, kept: bool = True, msg: str | None = None
    ) -> None:
        """Raise an error unless the frameworks agree.

        Args:
            rtol: as in `problems`.
            kept: as in `problems`.
            msg: a text to put in front of the error message.

        Raises:
            AssertionError: with each quantity that differs and by how much, the first operation
                that differs, and the regions whose bytes differ.
        """
        __tracebackhide__ = True
        problems = self.problems(rtol, kept=kept)
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            prefix = "" if msg is None else f"{msg}\n"
            raise AssertionError(f"{prefix}torch and JAX disagree about {self.name}:{lines}")

    def figures(self) -> dict[str, Any]:
        """All figures as numbers, strings, lists and dicts."""
        return {**asdict(self), "kept_equal": self.kept_equal, "agrees": self.agrees}

    def to_json(self, path: str | Path) -> Path:
        """Write all figures to a file, and return its path."""
        path = Path(path)
        path.write_text(json.dumps(self.figures(), indent=2) + "\n")
        return path

    def to_html(self, path: str | Path) -> Path:
        """Write a self-contained page with all figures, and return its path."""
        lines = self.problems()
        if self.first is not None and self.first.source is not None:
            source = self.first.source
            lines.append(f"\nWhere it starts:\n{source}\n    {source.text}")
        lines += ["", str(self), "", json.dumps(self.figures(), indent=1)]
        path = Path(path)
        path.write_text(_PAGE.format(title=escape(self.name), text=escape("\n".join(lines))))
        return path

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """The table: quantity, torch, JAX, verdict."""
        for what, d in self.differences.items():
            yield (
                f"{what}: distance from float64, ulp",
                _ulps(d.torch_ulps),
                _ulps(d.jax_ulps),
                f"apart {_ulps(d.ulps)} ulp, {d.relative:.1e}" + ("" if d.agrees else " DIFFERENT"),
            )
        if self.kept_torch is not None and self.kept_jax is not None:
            yield from self._kept_rows(self.kept_torch, self.kept_jax)
        for what, run in self.runs.items():
            if run.torch_peak is not None:
                name = f"{what}: peak / XLA temporary bytes"
                yield name, f"{run.torch_peak:,}", f"{run.xla_temp:,}", ""
            if run.torch_seconds is not None:
                yield f"{what}: seconds", f"{run.torch_seconds:.4f}", f"{run.jax_seconds:.4f}", ""
            p = run.products
            if p is not None:
                recomputed = f"{p.torch_recomputed} and {p.jax_recomputed} recomputed"
                remark = recomputed if p.torch_recomputed or p.jax_recomputed else ""
                yield f"{what}: matrix products", str(p.torch), str(p.jax), remark
        if self.first is not None:
            source = self.first.source
            where = f"{Path(source.file).name}:{source.line}" if source else ""
            yield f"first {self.first.what} that differs", self.first.name, "", where

    def _kept_rows(self, a: Kept, b: Kept) -> Iterator[tuple[str, str, str, str]]:
        for attribute in ("activations", "arguments", "regions"):
            x, y = getattr(a, attribute), getattr(b, attribute)
            what = attribute if attribute == "regions" else f"bytes kept at regions, {attribute}"
            not_read = attribute == "arguments" or self.kept_equal
            differs = f"{x - y:,} not read" if not_read else "DIFFERENT"
            yield what, f"{x:,}", f"{y:,}", "equal" if x == y else differs
        if not self.kept_equal:
            yield from ((*row, "DIFFERENT") for row in _differing(a, b))
        if a.storages != a.activations:
            yield "bytes of the storages they view", f"{a.storages:,}", "", ""

    def rows_of_ways(self) -> Iterator[tuple[str, ...]]:
        """The second table, for ``compiled``: quantity, eager, traced, functx.jit, JAX."""
        for what, ways in self.ways.items():
            every = [ways[name] for name in WAYS]
            differences = [way.difference for way in every]
            yield (
                f"{what}: distance from eager, relative",
                *("" if d is None else f"{d.relative:.1e}" for d in differences),
            )
            if what != "value":
                cells = (f"{w.products} ({w.again})" if w.again else str(w.products) for w in every)
                yield f"{what}: products (run again)", *cells
            if every[0].bytes is not None:
                yield f"{what}: peak bytes", *(f"{way.bytes:,}" for way in every)

    def __str__(self) -> str:
        lines = _table([("", "torch", "JAX", ""), *self.rows()], "<>><")
        if self.ways:
            lines += ["", *_table([("", *WAYS), *self.rows_of_ways()], "<>>>>")]
        verdict = f"torch and JAX {'agree' if self.agrees else 'disagree'}"
        return "\n".join([f"crosscheck {self.name}", *lines, verdict])

    __repr__ = __str__


_AS = {TRACED: "as traced by functx.jit", COMPILED: "as compiled by functx.jit"}


def _table(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(sides))]
    return [
        "  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, widths)).rstrip()
        for row in rows
    ]


def _how_far(d: Difference, allowed: float, other: str = "JAX") -> str:
    if not math.isfinite(d.absolute):
        which = "framework" if other == "JAX" else "of the two"
        return f": NaN or infinity in one {which}, where the other has another value"
    text = (
        f" by {d.relative:.3g} relative ({d.absolute:.3g} absolute, {d.ulps:.3g} ulp), more than"
        f" rtol={allowed:g}"
    )
    if d.torch_ulps is None or d.jax_ulps is None:
        return text
    text += (
        f"; torch differs from torch in float64 by {_ulps(d.torch_ulps)} ulp, and {other} by"
        f" {_ulps(d.jax_ulps)} ulp"
    )
    lost = d.torch_ulps > max(64, 4 * d.jax_ulps) and d.relative < 0.01
    return f"{text}: torch has lost precision" if lost else text


def _alike(a: Kept | RegionResiduals, b: Kept | RegionResiduals) -> bool:
    """Whether torch (a) keeps the same activations as JAX (b), and perhaps more integers."""
    more = a.integers - b.integers
    return a.activations - b.activations == more >= 0


def _differing(a: Kept, b: Kept) -> Iterator[tuple[str, str, str]]:
    """Regions that keep different bytes: their names, and the bytes in torch and in JAX."""
    for n, (r, s) in enumerate(zip(a.by_region, b.by_region), 1):
        if not _alike(r, s):
            yield f"region {n}, {r.name}", f"{r.activations:,}", f"{s.activations:,}"


def _in_words(kept: Kept) -> str:
    return (
        f"{kept.activations:,} of activations and {kept.arguments:,} of arguments in"
        f" {kept.regions} regions"
    )


def _ulps(x: float | None) -> str:
    if x is None:
        return "no reference"
    return f"{x:.3g}" if x < 1e4 else f"{x:.1e}"
