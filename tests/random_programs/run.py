"""The sweep: ``python -m tests.random_programs.run --seeds 0:1000 [--jobs 2] [--json FILE]``.

Workers are forked processes, so that a program which ends its process costs only its own seed.
``--seed SEED`` runs one program and prints it with the traceback, and ``--shrink SEED`` takes away
what does not matter to its outcome.
"""

import argparse
import collections
import faulthandler
import json
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

import functx

from .judge import FAILURES, OUTCOMES, Verdict, judge, warm
from .shrink import forked, smallest
from .writer import write

SECONDS = 60  # longer than any program takes


def work(seeds, file, library):
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


def supervise(seeds, file, library):
    """Start a process for these programs, and another one for the rest when it has ended."""
    while seeds:
        code = forked(lambda seeds=seeds: work(seeds[:1000], file, library))()
        lines = file.read_text().splitlines() if file.exists() else []
        seeds = [n for n in seeds if n not in {json.loads(line)[0] for line in lines}]
        if code:
            verdict = Verdict("crashed", f"the process ended with {code}")
            with file.open("a") as out:
                out.write(json.dumps([seeds.pop(0), asdict(verdict)]) + "\n")


def sweep(seeds, jobs=1, library=functx):
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


def report(found):
    """Print what was found, and return it as JSON."""
    failures = {n: v for n, v in found.items() if v.outcome in FAILURES}
    for seed, verdict in failures.items():
        print(f"--- {seed}: {verdict.outcome}: {verdict.why}\n{write(seed)}\n")
    for outcome, meaning in OUTCOMES.items():
        seeds = [n for n, v in found.items() if v.outcome == outcome]
        print(f"{len(seeds):7} {outcome:18} {meaning}", seeds if outcome in FAILURES else "")
        heads = collections.Counter(found[n].why for n in seeds if found[n].why)
        for head, count in heads.most_common(15) if outcome != "wrong" else []:
            print(f"{count:16}  {head}")
    counts = {name: sum(v.outcome == name for v in found.values()) for name in OUTCOMES}
    return {"counts": counts, "failures": {n: asdict(v) for n, v in failures.items()}}


def main():
    """The command line."""
    parser = argparse.ArgumentParser(prog="random_programs.run", description="Random programs.")
    parser.add_argument("--seeds", default="0:1000", metavar="FIRST:END")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="counts and failures")
    parser.add_argument("--torch", action="store_true", help="compare with torch.func's transforms")
    for name in ("seed", "shrink"):
        parser.add_argument(f"--{name}", type=int, metavar="SEED")
    args = parser.parse_args()
    library = torch.func if args.torch else functx
    for seed in (n for n in (args.shrink, args.seed) if n is not None):
        program = write(seed)
        shrunk = args.shrink is not None
        program, verdict = (
            smallest(program, library) if shrunk else (program, judge(program, library=library))
        )
        print(f"{program}\n# {verdict.outcome}: {verdict.why}\n{verdict.trace}")
        return int(verdict.outcome in FAILURES)
    result = report(sweep(range(*map(int, args.seeds.split(":"))), args.jobs, library))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
