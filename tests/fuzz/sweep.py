"""The sweep: numbered programs in slices, whose results are put together in a report.

A slice is a range of numbers. Its census is written down when it has run, and a slice of the same
sources that is there already is not run again, so a sweep that was stopped goes on where it was. By
hand, ``python -m fuzz.sweep FIRST LAST`` in ``tests/`` runs a range, and prints how far it is;
``python -m fuzz.sweep mechanisms 0 2``, and ``1 2``, run the programs without each mechanism.
Whatever runs last (slices run in several processes) writes the report.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from functx._remat import _holders
from functx._remat._prune import Departed

from .census import FEATURES, Census
from .found import FOUND
from .found_departing import DEPARTING
from .found_hooks import WITH_HOOKS
from .found_policies import WITH_POLICIES
from .found_python import WITH_PYTHON_ON_THE_TAPE
from .mechanisms import MECHANISMS
from .program import Program
from .runner import Difference, Refused, Result, check, reference
from .writer import numbered

KEPT = FOUND | WITH_HOOKS | WITH_POLICIES | DEPARTING | WITH_PYTHON_ON_THE_TAPE
PROGRAMS = 10_000
SLICE = 100
DIFFERS = "differs"
ROOT = Path(__file__).parents[2]
HISTORY = Path(__file__).with_name("history.md")
REPORT = ROOT / "docs" / "fuzz.md"


def one(program: Program, name: str, census: Census) -> None:
    """A program, with and without remat.

    Raises:
        Difference: it did something else; the census has it under ``name``.
    """
    try:
        expected = reference(program)
    except Exception:  # torch refuses the program itself
        census.refused += 1
        return
    try:
        ours = check(program, expected)
    except Refused as refusal:
        census.refusals[str(refusal)] += 1
    except Difference as difference:
        census.holds(program)
        census.failures[name] = " ".join(str(difference).split())[:300]
        raise
    else:
        census.add(program, ours, expected)


@contextmanager
def quick_collections() -> Iterator[None]:
    """What is there by now is not looked through each time that garbage is collected."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_slice(first: int, last: int) -> Census:
    """The programs from ``first`` up to, not including, ``last``; differences are noted."""
    census = Census()
    with (
        quick_collections(),
        warnings.catch_warnings(),
        torch.autograd.graph.disable_saved_tensors_hooks("functx uses no hooks"),
    ):
        warnings.simplefilter("ignore")
        for number in range(first, last):
            try:
                one(numbered(number), str(number), census)
            except Difference as difference:
                print(f"program {number}: {difference}", flush=True)
    return census


@functools.cache
def results() -> Path:
    """Where results are of the engine and the programs as they are."""
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in ("functx", "tests/fuzz"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    folder = ROOT / ".fuzz" / digest.hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(name: str, text: str) -> None:
    """A result, whole or not at all."""
    part = results() / f"{name}.{os.getpid()}"
    part.write_text(text)
    part.rename(results() / name)


def slice_of_sweep(first: int, last: int) -> Census:
    """The census of a slice, run now if it is not there."""
    path = results() / f"{first:05}.json"
    if not path.exists():
        write(path.name, run_slice(first, last).dumps())
    return Census.loads(path.read_text())


def notices(name: str) -> int | str | None:
    """The first program that does otherwise without a mechanism of the engine.

    Numbered ones first, then those that were found before and are kept, which have names. Where it
    only runs more operations, how many.
    """
    path = results() / f"{name}.mechanism"
    if not path.exists():
        notice([name])
    return json.loads(path.read_text())


def notice(names: Sequence[str], last: int = 1000) -> None:
    """`notices` of several mechanisms, of which each program is run without each."""
    left = [name for name in names if not (results() / f"{name}.mechanism").exists()]
    with (
        quick_collections(),
        warnings.catch_warnings(),
        torch.autograd.graph.disable_saved_tensors_hooks("functx uses no hooks"),
    ):
        warnings.simplefilter("ignore")
        numbers = ((number, numbered(number)) for number in range(last))
        for found, program in itertools.chain(numbers, KEPT.items()):
            if not left:
                break
            try:
                expected = reference(program)
                usual = check(program, expected).operations
            except Exception:  # torch refuses it, functx does, or it differs anyway
                continue
            for name in [*left]:
                if does := does_without(name, program, expected, usual):
                    print(f"{name}: {found} {does}", flush=True)
                    known = found if does == DIFFERS else f"{found} {does}"
                    write(f"{name}.mechanism", json.dumps(known))
                    left.remove(name)
        for name in left:
            print(f"{name}: none", flush=True)
            write(f"{name}.mechanism", json.dumps(None))


def does_without(name: str, program: Program, expected: Result, usual: int) -> str | None:
    """What a program does otherwise without a mechanism, if only that more operations run.

    Args:
        name: of the mechanism.
        program: that is right with it.
        expected: what it gives without remat.
        usual: how many operations run with the mechanism.
    """
    with pytest.MonkeyPatch.context() as patch:
        MECHANISMS[name](patch)
        try:
            operations = check(program, expected).operations
        except (Difference, Departed, Refused):
            return DIFFERS
        finally:
            _holders._own.holds = []  # what was interrupted may have left some
    if operations <= usual or operations <= check(program, expected).operations:
        return None
    return f"runs {operations:,} operations, not {usual:,}"


def put_together() -> Census | None:
    """All slices and all mechanisms, if they have run: then the report is written."""
    paths = [results() / f"{first:05}.json" for first in range(0, PROGRAMS, SLICE)]
    paths += [results() / f"{name}.mechanism" for name in MECHANISMS]
    if not all(path.exists() for path in paths):
        return None
    census = Census()
    for path in paths:
        if path.suffix == ".json":
            census += Census.loads(path.read_text())
    REPORT.write_text(report(census, {name: notices(name) for name in MECHANISMS}))
    return census


def report(census: Census, noticed: dict[str, int | str | None]) -> str:
    """The report, in Markdown.

    Args:
        census: of the sweep.
        noticed: for each mechanism of the engine, the first program that does otherwise without
            it. A name is of a program that was found before and is kept.
    """
    n = census.programs
    errors = sum(said.startswith("raises ") for said in census.failures.values())
    held = sum("are held" in said for said in census.failures.values())
    wrong = len(census.failures) - errors - held
    lines = [
        "# Random programs",
        "",
        f"{n + census.refused + census.refusals.total():,} random programs of tensor operations, "
        "views, in-place updates, random numbers, closures and modules, with `remat` at random "
        "places and under random stacks of transforms, against the same program without `remat`, "
        "in float64: values of forward passes and of forward mode bit by bit, with what was "
        "written to and the states of generators; gradients within 8 roundings of the sum of "
        f"absolute contributions. Written by `make sweep` (`tests/fuzz`) on commit `{_commit()}`.",
        "",
        f"- programs that ran: {n:,}; **{len(census.failures)} differ**: {errors} by an error "
        f"where there is none without `remat`, {held} by what is held after the forward, {wrong} "
        "silently, by another value",
        f"- further programs that torch itself refuses: {census.refused:,}",
        *(
            f"- further programs that functx refuses, as documented ('... {said} ...'): {count:,}"
            for said, count in sorted(census.refusals.items())
        ),
        f"- regions ended {census.forward:,} times without `remat`, and {census.again:,} times "
        "more with it; where a gradient reaches the result of a region without a policy "
        f"({census.reached:,} programs), a program in which nothing ran again fails",
        "- where nothing is computed backwards in the forward, and no policy keeps what no tape "
        "would, a program fails in which more is held after the forward, of what regions make, "
        "than without `remat` and what other regions read",
        "- two programs in three run several times more, as in a training loop, till what their "
        "regions do is known, and their pullbacks are no replays; in the first run, all is the "
        "same, or a leaf or the input is not differentiated, or the batch is another one",
        "",
        HISTORY.read_text(),
    ]
    if census.failures:
        lines += ["## What differs", "", "| program | difference |", "|---|---|"]
        lines += [
            f"| {number} | {said.replace('|', ' ')} |"
            for number, said in sorted(census.failures.items(), key=lambda f: int(f[0]))
        ]
        lines.append("")
    lines += ["## What programs held", "", "| | feature | share |", "|---|---|---|"]
    for group, names in FEATURES.items():
        lines += [f"| {group} | {name} | {census.share(name):.1%} |" for name in names]
    lines += [
        "",
        f"Stacks of transforms: {len(census.stacks)} different ones, to a depth of three. The most "
        "frequent: "
        + ", ".join(f"{stack} ({count:,})" for stack, count in census.stacks.most_common(12))
        + ".",
        "",
        "## Mechanisms of the engine, taken out one by one",
        "",
        "A number is of one of the first 1,000 programs; where none of them differs, a name is of "
        "one that was found before and is kept (`tests/fuzz/found*.py`). It differs; or where "
        "replays only begin again, more operations run, and the table says how many.",
        "",
        "| mechanism | without it | first program that does otherwise |",
        "|---|---|---|",
        *(
            f"| {name} | {MECHANISMS[name].__doc__} | {'none' if number is None else number} |"
            for name, number in noticed.items()
        ),
        "",
    ]
    return "\n".join(lines)


def _commit() -> str:
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip() or "unknown"


def main() -> None:
    """Slices of a range, in order; or some mechanisms, one in so many, from the first on."""
    if sys.argv[1] == "mechanisms":
        first, step = map(int, sys.argv[2:])
        notice([*MECHANISMS][first::step])
        put_together()
        return
    first, last = int(sys.argv[1]), int(sys.argv[2])
    for start in range(first, last, SLICE):
        census = slice_of_sweep(start, min(start + SLICE, last))
        print(f"{start + SLICE}: {census.programs} ran, {len(census.failures)} differ", flush=True)
    put_together()


if __name__ == "__main__":
    main()
