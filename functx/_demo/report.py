"""What the demo leaves behind: a table on the screen, a picture, and all figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from functx import memory
from functx._demo.measure import Row

MIB = 2**20


def memory_table(rows: Sequence[Row]) -> Table:
    """The rows as a table: bytes in MiB, peak and time as ratios to the first row too."""
    first = rows[0]
    table = Table(title="per-example gradients of one batch", title_justify="left")
    table.add_column("library")
    table.add_column("blocks under")
    for name in ("kept, MiB", "peak, MiB", "ratio", "time, ms", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.error is not None:
            table.add_row(row.library, row.remat, "error", "error", "", "", "")
            continue
        assert row.kept is not None
        assert row.peak is not None
        assert row.seconds is not None
        table.add_row(
            row.library,
            row.remat,
            f"{row.kept / MIB:.2f}",
            f"{row.peak / MIB:.2f}",
            f"{row.peak / first.peak:.2f}" if first.peak else "",
            f"{row.seconds * 1e3:.0f}",
            f"{row.seconds / first.seconds:.2f}" if first.seconds else "",
        )
    return table


def picture(rows: Sequence[Row], path: Path) -> Path:
    """Draw live bytes over operations of every row that torch ran."""
    profiles = {
        f"{row.library}, {'remat' if row.remat != 'no' else 'no remat'}": row.profile
        for row in rows
        if row.profile is not None
    }
    return memory.plot(profiles, path)


def row_figures(row: Row) -> dict[str, Any]:
    """A row as plain numbers, for JSON."""
    names = ("library", "remat", "kept", "peak", "seconds", "error")
    units = {"kept": "kept_bytes", "peak": "peak_bytes"}
    return {units.get(name, name): getattr(row, name) for name in names}


def write_json(figures: dict[str, Any], path: Path) -> Path:
    """Write ``figures``, indented, and return ``path``."""
    path.write_text(json.dumps(figures, indent=2) + "\n")
    return path
