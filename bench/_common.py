"""What every bench shares: the clock, the environment, tables from rows, JSON.

A result is rows of plain numbers with columns that say how to print them, so that the table on the
screen, the JSON and the README can't differ.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of <malloc.h>


@dataclass(frozen=True)
class Column:
    """How one figure of a row is printed.

    Attributes:
        key: Its name in the row.
        title: The head of the column, with the unit.
        format: A format specification for the number.
        scale: What the number is divided by first.
    """

    key: str
    title: str
    format: str = ""
    scale: float = 1.0

    def text(self, row: dict[str, Any]) -> str:
        """The cell: a number as told, words as they are, a dash where there is nothing."""
        value = row.get(self.key)
        if value is None:
            return "error" if row.get("error") and self.key != "error" else "-"
        return value if isinstance(value, str) else format(value / self.scale, self.format)


@dataclass
class Result:
    """What a bench found.

    Attributes:
        bench: Its name, and that of the JSON file.
        claim: What it shows, in a sentence.
        columns: How to print the rows.
        rows: Plain numbers and words by key; ``error`` says why numbers are missing.
        notes: Sentences to print below the table.
        environment: Versions and machine.
    """

    bench: str
    claim: str
    columns: list[Column]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path | None = None) -> Path:
        """Write ``folder/<bench>.json``; figures of CUDA are kept apart from those of the CPU."""
        if folder is None:
            folder = RESULTS / "cuda" if "device" in self.environment else RESULTS
        folder.mkdir(exist_ok=True, parents=True)
        path = folder / f"{self.bench}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result that `write` wrote."""
        figures = json.loads(path.read_text())
        figures["columns"] = [Column(**column) for column in figures["columns"]]
        return cls(**figures)

    def markdown(self) -> str:
        """The claim, the table and the notes, for a page."""
        lines = [self.claim, ""]
        lines.append("| " + " | ".join(column.title for column in self.columns) + " |")
        numbers = [not isinstance(self.rows[0].get(c.key), str) for c in self.columns]
        lines.append("|" + "|".join("---:" if n else "---" for n in numbers) + "|")
        lines += [
            "| " + " | ".join(column.text(row) for column in self.columns) + " |"
            for row in self.rows
        ]
        where = ", ".join(f"{name} {version}" for name, version in self.environment.items())
        return "\n".join([*lines, "", " ".join([*self.notes, f"({where})"])])

    def show(self) -> None:
        """Print the table."""
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            print(self.markdown())
            return

        table = Table(title=self.claim, title_justify="left")
        for column in self.columns:
            number = not isinstance(self.rows[0].get(column.key), str)
            table.add_column(column.title, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*(column.text(row) for column in self.columns))
        console = Console(highlight=False)
        console.width = max(console.width, 110)
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False)


def device_argument(bench: str, claim: str) -> torch.device:
    """The device that the command line of a bench asks for."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{bench}", description=claim)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    # JAX would take most of the GPU's memory at its first use.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return torch.device(parser.parse_args().device)


def environment(device: torch.device, *packages: str) -> dict[str, str]:
    """Versions of what was measured, and on what."""
    found = {name: importlib.metadata.version(name) for name in ("torch", *packages)}
    if device.type == "cuda":
        return found | {"device": torch.cuda.get_device_name(device)}
    return found | {"on": platform.machine(), "threads": str(torch.get_num_threads())}


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads of torch's that wait for work use CPU time as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def keep_freed_memory() -> bool:
    """From now on the C library keeps the memory that this process lets go of.

    As it comes it hands it back to the system now and then, by what lies at the end of the heap,
    and the page faults that follow cost a program of many large tensors up to a tenth of its time,
    or nothing.

    Returns:
        Whether it can be told so.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))


def installed(*packages: str) -> list[str]:
    """Those of some packages that are."""
    return [name for name in packages if importlib.util.find_spec(name)]


def median_seconds(
    runs: Sequence[Callable[[], Any]],
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
    device: torch.device | None = None,
) -> list[float]:
    """Median times of calls, taken in turns, so that a slow moment of the machine hits all alike.

    Args:
        runs: What to time.
        repeats: How many rounds count; one more goes before, to warm up.
        clock: ``time.process_time`` for CPU time, all threads together.
        device: Waited for after each call if it is CUDA.

    Returns:
        Seconds, one a run.
    """
    return [statistics.median(own) for own in _in_turns(runs, repeats, clock, device)]


def least_seconds(
    runs: Sequence[Callable[[], Any]],
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
    device: torch.device | None = None,
) -> list[float]:
    """Least times of calls, taken in turns: for what others on the machine only make slower."""
    return [min(own) for own in _in_turns(runs, repeats, clock, device)]


def _in_turns(
    runs: Sequence[Callable[[], Any]],
    repeats: int,
    clock: Callable[[], float],
    device: torch.device | None,
) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, own in zip(runs, times):
            start = clock()
            run()
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
            own.append(clock() - start)
    return [own[1:] for own in times]


def device_seconds(run: Callable[[], Any], repeats: int, device: str) -> float:
    """The median time of a call once warm, by device events on CUDA.

    Args:
        run: What to time; called twice before.
        repeats: Calls that count.
        device: ``"cuda"`` or ``"cpu"``.
    """
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            before = time.perf_counter()
            run()
            times.append(time.perf_counter() - before)
    return statistics.median(times[2:])


def short_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or JAX says that memory ran out."""
    text = str(error)
    signs = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(sign in text for sign in signs)


def ratios(rows: Sequence[dict[str, Any]], key: str, base: dict[str, Any]) -> None:
    """Add ``<key>_ratio`` to each row: its figure over that of ``base``."""
    for row in rows:
        if row.get(key) is not None and base.get(key):
            row[f"{key}_ratio"] = row[key] / base[key]
