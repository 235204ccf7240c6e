"""The sweep: ``python -m tests.random_programs.run --seeds 0:1000 [--jobs 2] [--json FILE]``.

Each worker is a forked process that takes seeds one after the other and writes a line for each, so
that a program which ends its process costs only its own seed.

``--show SEED`` prints a program, ``--seed SEED --verbose`` runs one with the traceback, and
``--shrink SEED`` takes away what does not matter to its outcome.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import os
import selectors
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import functx

from .judge import FAILURES, OUTCOMES, Verdict, judge, warm
from .program import Program
from .shrink import smallest
from .writer import write

SECONDS = 60  # longer than any program takes
RENEWED = 1000  # programs a process


@dataclass
class Census:
    """Outcomes by seed, and features by program."""

    verdicts: dict[int, Verdict] = field(default_factory=dict)
    features: collections.Counter = field(default_factory=collections.Counter)

    def counts(self) -> dict[str, int]:
        found = collections.Counter(v.outcome for v in self.verdicts.values())
        return {name: found[name] for name in OUTCOMES}

    def failures(self) -> dict[int, Verdict]:
        return {n: v for n, v in sorted(self.verdicts.items()) if v.outcome in FAILURES}

    def heads(self, *outcomes: str) -> list[tuple[str, int]]:
        """The reasons given, the most frequent first."""
        heads = (v.why for v in self.verdicts.values() if v.outcome in outcomes and v.why)
        return collections.Counter(heads).most_common()

    def add(self, seed: int, program: Program, verdict: Verdict) -> None:
        self.verdicts[seed] = verdict
        self.features.update(program.features)


def _work(seeds: list[int], pipe: int, library: Any) -> None:
    """A worker's life."""
    with os.fdopen(pipe, "w", buffering=1) as out:
        torch.set_num_threads(1)
        for seed in seeds:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            verdict = judge(write(seed), library=library)
            faulthandler.cancel_dump_traceback_later()
            out.write(json.dumps([seed, asdict(verdict)]) + "\n")
            if verdict.outcome == "leaked":
                return  # the next process starts without what it left behind


@dataclass
class Worker:
    """A forked process, the seeds that it has not done yet, and what it has written."""

    pending: list[int]
    library: Any
    pid: int = 0
    pipe: int = 0
    text: bytes = b""

    def start(self) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            try:
                _work(self.pending[:RENEWED], writing, self.library)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        os.close(writing)
        self.pipe, self.text = reading, b""


def sweep(seeds: range, jobs: int = 1, library: Any = functx) -> Census:
    """Judge the programs of these seeds in processes of their own."""
    warm()
    census, selector = Census(), selectors.DefaultSelector()
    for n in range(jobs):
        worker = Worker(list(seeds)[n::jobs], library)
        if worker.pending:
            worker.start()
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
    while selector.get_map():
        for key, _ in selector.select():
            worker = key.data
            data = os.read(worker.pipe, 1 << 16)
            *lines, worker.text = (worker.text + data).split(b"\n")
            for line in lines:
                seed, verdict = json.loads(line)
                worker.pending.remove(seed)
                census.add(seed, write(seed), Verdict(**verdict))
            if data:
                continue
            selector.unregister(worker.pipe)
            os.close(worker.pipe)
            status = os.waitpid(worker.pid, 0)[1]
            if status != 0:
                seed = worker.pending.pop(0)
                why = f"the process ended with {os.waitstatus_to_exitcode(status)}"
                census.add(seed, write(seed), Verdict("crashed", why))
            if worker.pending:
                worker.start()
                selector.register(worker.pipe, selectors.EVENT_READ, worker)
    return census


def _report(census: Census, seconds: float, json_file: str | None) -> None:
    """Print what was found, and write it to a file."""
    for seed, verdict in census.failures().items():
        print(f"--- {seed}: {verdict.outcome}: {verdict.why}\n{write(seed)}\n")
    done = len(census.verdicts)
    print(f"{done} programs in {seconds:.0f} s, {done / seconds:.1f} a second")
    for outcome, count in census.counts().items():
        seeds = [n for n, v in sorted(census.verdicts.items()) if v.outcome == outcome]
        shown = f"  {seeds[:20]}" if outcome in FAILURES and seeds else ""
        print(f"{count:7} {outcome:18} {OUTCOMES[outcome]}{shown}")
    for outcome in ("refused wrongly", "refused", "refused by torch", "crashed", "equal"):
        for head, count in census.heads(outcome)[:15]:
            print(f"{count:7} {outcome}: {head}")
    if json_file:
        found = {
            "counts": census.counts(),
            "programs": {n: asdict(v) for n, v in census.failures().items()},
            "features": {n: c / done for n, c in sorted(census.features.items())},
        }
        with open(json_file, "w") as out:
            json.dump(found, out, indent=1)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", help="write counts, failures and shares of features there")
    parser.add_argument("--seed", type=int, help="run this one here")
    parser.add_argument("--verbose", action="store_true", help="with the traceback")
    parser.add_argument("--show", type=int, metavar="SEED")
    parser.add_argument("--shrink", type=int, metavar="SEED")
    parser.add_argument(
        "--torch", action="store_true", help="compare with transforms of torch.func"
    )
    parser.add_argument("--features", action="store_true", help="shares of programs, and stop")
    args = parser.parse_args()
    library = torch.func if args.torch else functx
    first, end = map(int, args.seeds.split(":"))
    if args.show is not None:
        print(write(args.show))
        return 0
    if args.features:
        shares = collections.Counter(f for n in range(first, end) for f in write(n).features)
        for name, count in shares.most_common():
            print(f"{100 * count / (end - first):6.1f} %  {name}")
        return 0
    if args.shrink is not None:
        program, verdict = smallest(write(args.shrink), library)
        print(f"{program}\n# {verdict.outcome}: {verdict.why}\n{verdict.trace}")
        return 0
    if args.seed is not None:
        program = write(args.seed)
        print(program)
        verdict = judge(program, library=library)
        print(f"# {verdict.outcome}: {verdict.why}\n{verdict.trace if args.verbose else ''}")
        return int(verdict.outcome in FAILURES)
    start = time.perf_counter()
    census = sweep(range(first, end), args.jobs, library)
    _report(census, time.perf_counter() - start, args.json)
    return int(bool(census.failures()))


if __name__ == "__main__":
    sys.exit(main())
