"""The sweep: ``python -m tools.fuzz.run --seeds 0:1000 [--jobs 2] [--json FILE]``.

Programs run in forked processes, so that one which ends its process costs only its own seed.
"""

import argparse
import collections
import faulthandler
import json
import sys
import tempfile
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch

from tools.fuzz.judge import FAILURES, Verdict, judge, warm
from tools.fuzz.writer import write
from tools.share import counting, report

SECONDS = 240  # longer than any program takes
FORK = get_context("fork")


def work(seeds, file):
    """Judge one program after the other, and write a line for each."""
    torch.set_num_threads(1)
    for seed in seeds:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        runs = collections.Counter()
        with counting(runs):
            verdict = judge(write(seed))
        with file.open("a") as out:
            out.write(json.dumps([seed, asdict(verdict), runs]) + "\n")
        if verdict.outcome == "leaked":
            break  # the next process starts without what this one left behind
    faulthandler.cancel_dump_traceback_later()


def supervise(seeds, file):
    """Start a process for these programs, and another one for the rest when it has ended."""
    file.touch()
    while seeds:
        process = FORK.Process(target=work, args=(seeds[:1000], file))
        process.start()
        process.join()
        done = {json.loads(line)[0] for line in file.read_text().splitlines()}
        seeds = [n for n in seeds if n not in done]
        if process.exitcode:
            verdict = Verdict("crashed", f"the process ended with {process.exitcode}")
            with file.open("a") as out:
                out.write(json.dumps([seeds.pop(0), asdict(verdict), {}]) + "\n")


def sweep(seeds, jobs):
    """Verdicts on the programs of these seeds, and how their regions ran."""
    warm()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(n)) for n in range(min(jobs, len(seeds)))]
        parts = [(list(seeds[n :: len(files)]), file) for n, file in enumerate(files)]
        processes = [FORK.Process(target=supervise, args=part) for part in parts]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    runs = sum((collections.Counter(line[2]) for line in lines), collections.Counter())
    lines.sort(key=lambda line: line[0])
    return {seed: Verdict(**verdict) for seed, verdict, _ in lines}, runs


def main():
    parser = argparse.ArgumentParser(prog="tools.fuzz.run", description="Random programs.")
    parser.add_argument("--seeds", default="0:1000", metavar="FIRST:END")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="counts and failures")
    args = parser.parse_args()
    found, runs = sweep(range(*map(int, args.seeds.split(":"))), args.jobs)
    failures = {n: v for n, v in found.items() if v.outcome in FAILURES}
    for seed, verdict in failures.items():
        print(f"--- {seed}: {verdict.outcome}: {verdict.why}\n{write(seed)}\n{verdict.trace}\n")
    counts = collections.Counter((v.outcome, v.why) for v in found.values())
    for (outcome, why), count in counts.most_common(40):
        print(f"{count:7} {outcome:18} {why}")
    print(report(runs))
    if args.json:
        counts = collections.Counter(v.outcome for v in found.values())
        wrong = {n: asdict(v) for n, v in failures.items()}
        args.json.write_text(
            json.dumps({"counts": counts, "failures": wrong, "runs": runs}, indent=1)
        )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
