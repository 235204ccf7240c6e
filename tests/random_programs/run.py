"""The sweep: ``python -m tests.random_programs.run --seeds 0:1000 [--jobs 2] [--json FILE]``.

Workers are forked processes, so that a program which ends its process costs only its own seed.
``--show SEED`` prints a program, ``--seed SEED --verbose`` runs it with the traceback, and
``--shrink SEED`` takes away what does not matter to its outcome.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import functx

from .judge import FAILURES, OUTCOMES, Verdict, judge, warm
from .shrink import forked, smallest
from .writer import write

SECONDS = 60  # longer than any program takes


def work(seeds: list[int], file: Path, library: Any) -> None:
    """Judge one program after the other, and write a line for each."""
    torch.set_num_threads(1)
    for seed in seeds:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        verdict = judge(write(seed), library=library)
        with file.open("a") as out:
            out.write(json.dumps([seed, asdict(verdict)]) + "\n")
        if verdict.outcome == "leaked":
            break  # the next process starts without what this one left behind
    faulthandler.cancel_dump_traceback_later()


def supervise(seeds: list[int], file: Path, library: Any) -> None:
    """Start a process for these programs, and another one for the rest when it has ended."""
    while seeds:
        code = forked(lambda seeds=seeds: work(seeds[:1000], file, library))()
        lines = file.read_text().splitlines() if file.exists() else []
        seeds = [n for n in seeds if n not in {json.loads(line)[0] for line in lines}]
        if code:
            verdict = Verdict("crashed", f"the process ended with {code}")
            with file.open("a") as out:
                out.write(json.dumps([seeds.pop(0), asdict(verdict)]) + "\n")


def sweep(seeds: range, jobs: int = 1, library: Any = functx) -> dict[int, Verdict]:
    """Judge the programs of these seeds in processes of their own."""
    warm()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(n)) for n in range(min(jobs, len(seeds)))]
        parts = [list(seeds[n :: len(files)]) for n in range(len(files))]
        waits = [forked(partial(supervise, p, file, library)) for p, file in zip(parts, files)]
        codes = [wait() for wait in waits]
        assert not any(codes)
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {seed: Verdict(**verdict) for seed, verdict in sorted(found, key=lambda pair: pair[0])}


def report(found: dict[int, Verdict], seconds: float) -> dict[str, Any]:
    """Print what was found, and return it as JSON."""
    failures = {n: v for n, v in found.items() if v.outcome in FAILURES}
    for seed, verdict in failures.items():
        print(f"--- {seed}: {verdict.outcome}: {verdict.why}\n{write(seed)}\n")
    print(f"{len(found)} programs in {seconds:.0f} s, {len(found) / seconds:.1f} a second")
    for outcome, meaning in OUTCOMES.items():
        seeds = [n for n, v in found.items() if v.outcome == outcome]
        print(f"{len(seeds):7} {outcome:18} {meaning}", seeds if outcome in FAILURES else "")
        heads = collections.Counter(found[n].why for n in seeds if found[n].why)
        for head, count in heads.most_common(15) if outcome != "wrong" else []:
            print(f"{count:16}  {head}")
    features = collections.Counter(f for n in found for f in write(n).features)
    return {
        "counts": {name: sum(v.outcome == name for v in found.values()) for name in OUTCOMES},
        "failures": {n: asdict(v) for n, v in failures.items()},
        "features": {name: count / len(found) for name, count in sorted(features.items())},
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="random_programs.run", description="Random programs.")
    parser.add_argument("--seeds", default="0:1000", metavar="FIRST:END")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="counts, failures, and shares of features")
    parser.add_argument("--torch", action="store_true", help="compare with torch.func's transforms")
    for name in ("seed", "show", "shrink"):
        parser.add_argument(f"--{name}", type=int, metavar="SEED")
    parser.add_argument("--verbose", action="store_true", help="with the traceback")
    args = parser.parse_args()
    library = torch.func if args.torch else functx
    seeds = [n for n in (args.show, args.shrink, args.seed) if n is not None]
    if seeds:
        program, verdict = write(seeds[0]), Verdict("not run")
        if args.shrink is not None:
            program, verdict = smallest(program, library)
        elif args.seed is not None:
            verdict = judge(program, library=library)
        print(f"{program}\n# {verdict.outcome}: {verdict.why}")
        print(verdict.trace if args.verbose else "")
        return int(verdict.outcome in FAILURES)
    start = time.perf_counter()
    found = sweep(range(*map(int, args.seeds.split(":"))), args.jobs, library)
    result = report(found, time.perf_counter() - start)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
