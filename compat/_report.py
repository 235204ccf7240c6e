"""What a cross-check found, as an object that prints, saves and asserts."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from functx.compat._kept import Kept


@dataclass(frozen=True)
class Difference:
    """How far torch's and JAX's numbers are apart, over all leaves of a result.

    Attributes:
        absolute: the largest absolute difference.
        relative: the same, divided by the largest magnitude of the reference.
        torch_error: torch's largest distance from its own float64 result, relative; None if the
            function can't run in float64.
        jax_error: JAX's distance from it.
    """

    absolute: float
    relative: float
    torch_error: float | None
    jax_error: float | None


@dataclass(frozen=True)
class Run:
    """What it took to compute one quantity.

    Attributes:
        torch_peak: peak bytes of live storages in torch.
        xla_temp: temporary bytes of the compiled JAX program.
        torch_seconds: the fastest of the repetitions.
        jax_seconds: the same in JAX, compiled.
        dots: matrix products and convolutions in the compiled JAX program.
    """

    torch_peak: int | None
    xla_temp: int | None
    torch_seconds: float | None
    jax_seconds: float | None
    dots: int


@dataclass(frozen=True)
class Crosscheck:
    """The comparison of one function in torch and in JAX; prints as a table.

    Attributes:
        name: of the function.
        differences: of ``"value"``, ``"gradient"`` and, with ``in_dims``,
            ``"per-example gradient"``.
        runs: memory and time of each of them.
        kept_torch: bytes that torch's pullback keeps at region boundaries.
        kept_jax: bytes that JAX's pullback keeps there.
        merged_dots: products in the gradient if XLA is left to merge recomputations.
    """

    name: str
    differences: dict[str, Difference]
    runs: dict[str, Run]
    kept_torch: Kept
    kept_jax: Kept
    merged_dots: int

    @property
    def kept_equal(self) -> bool:
        """Whether both frameworks keep the same activations at the same number of regions.

        Arguments are alive anyway; JAX drops those that no derivative reads (a last bias, say).
        """
        a, b = self.kept_torch, self.kept_jax
        return (a.activations, a.regions) == (b.activations, b.regions)

    def assert_agrees(self, rtol: float = 1e-5) -> None:
        """Raise unless the frameworks agree.

        Args:
            rtol: the largest difference allowed, relative to the largest magnitude.

        Raises:
            AssertionError: naming each quantity that differs, and by how much.
        """
        problems = [
            f"the {what} differs by {d.relative:.3g} relative ({d.absolute:.3g} absolute), more"
            f" than rtol={rtol:g}{_whose(d)}"
            for what, d in self.differences.items()
            if not d.relative <= rtol
        ]
        if not self.kept_equal:
            problems.append(
                f"bytes kept at region boundaries differ: torch {_say(self.kept_torch)}, JAX"
                f" {_say(self.kept_jax)}; the cuts are not at the same places"
            )
        if problems:
            raise AssertionError(f"{self.name}: " + "; ".join(problems))

    def to_json(self, path: str | Path) -> None:
        """Write all figures to a file.

        Args:
            path: where to.
        """
        text = json.dumps({**asdict(self), "kept_equal": self.kept_equal}, indent=2)
        Path(path).write_text(text + "\n")

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """The table: quantity, torch, JAX, verdict."""
        for what, d in self.differences.items():
            yield (
                f"{what}: distance from float64",
                _small(d.torch_error),
                _small(d.jax_error),
                f"apart {d.relative:.1e}",
            )
        kept = (("activations", "activations"), ("arguments", "arguments"), ("regions", "regions"))
        for label, attribute in kept:
            a, b = getattr(self.kept_torch, attribute), getattr(self.kept_jax, attribute)
            what = "regions" if label == "regions" else f"bytes kept at regions, {label}"
            differs = "DIFFERENT" if label != "arguments" else f"{a - b:,} not read"
            yield what, f"{a:,}", f"{b:,}", "equal" if a == b else differs
        for what, run in self.runs.items():
            if run.torch_peak is not None:
                yield (
                    f"{what}: peak / XLA temporary bytes",
                    _count(run.torch_peak),
                    _count(run.xla_temp),
                    "",
                )
            if run.torch_seconds is not None:
                yield f"{what}: seconds", _time(run.torch_seconds), _time(run.jax_seconds), ""
        gradient = self.runs["gradient"].dots
        yield "products in the gradient", "", str(gradient), f"{self.merged_dots} if XLA may merge"

    def __str__(self) -> str:
        header = ("", "torch", "JAX", "")
        if importlib.util.find_spec("rich") is not None:
            return _rich(f"crosscheck {self.name}", header, list(self.rows()))
        return _plain(f"crosscheck {self.name}", [header, *self.rows()])

    __repr__ = __str__


def _whose(d: Difference) -> str:
    if d.torch_error is None or d.jax_error is None:
        return ""
    return f" (from float64: torch {d.torch_error:.3g}, JAX {d.jax_error:.3g})"


def _say(kept: Kept) -> str:
    return (
        f"{kept.activations:,} of activations and {kept.arguments:,} of arguments in"
        f" {kept.regions} regions"
    )


def _small(x: float | None) -> str:
    return "no reference" if x is None else f"{x:.1e}"


def _count(x: int | None) -> str:
    return "" if x is None else f"{x:,}"


def _time(x: float | None) -> str:
    return "" if x is None else f"{x:.4f}"


def _rich(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, title=title)
    for column in (1, 2):
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=110).print(table)
    return out.getvalue().rstrip()


def _plain(title: str, rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows
    ]
    return "\n".join([title, *lines])
