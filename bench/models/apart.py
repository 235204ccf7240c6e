"""Judges a model type in a process of its own, so that a crash or a hang costs only that type."""

import argparse
import json
import logging
import multiprocessing
import re
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

import torch

from functx._command.small_models import TYPES


def line(error, length=200):
    """An error in one line of a table."""
    text = " ".join(str(error).split()).replace("|", "\\|")
    return re.sub(r"/\S*/", "", text)[:length]


def parts(judge, name, limit):
    """Yields what ``judge(name)`` yields, and at the end why there is no more, or None.

    It has ``limit`` seconds.
    """
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(end, judge, name), daemon=True)
    process.start()
    until, more = time.monotonic() + limit, True
    while more:
        wait([pipe, process.sentinel], until - time.monotonic())
        if pipe.poll():
            more, part = pipe.recv()
        else:
            why = f"no answer in {limit} seconds" if process.is_alive() else "its process ended"
            more, part = False, ("lost", why)
        yield part
    process.kill()
    process.join()


def _child(pipe, judge, name):
    sys.stdout = sys.stderr = None
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        for part in judge(name):
            pipe.send((True, part))
        pipe.send((False, None))
    except Exception as error:
        pipe.send((False, ("raised", line(error))))


def sweep(record, names, jobs):
    """Yields the record of each type, of all types if none are named."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(record, TYPES if names is None else names)


def _resumed(sweep, options, describe):
    """The records of a sweep, those in the file ``options.json`` first; each is added to it."""
    records, file = [], options.json
    if file and file.exists():
        records = [json.loads(text) for text in file.read_text().splitlines()]
    known = {record["type"] for record in records}
    names = options.types.split(",") if options.types else TYPES
    for record in sweep([name for name in names if name not in known], options.jobs):
        records.append(record)
        start = f"{len(records):4} {record['type']:28} {record['seconds']:5.1f} s"
        print(f"{start}  {describe(record)}", flush=True)
        if file:
            with file.open("a") as to:
                to.write(json.dumps(record) + "\n")
    return records


def main(description, sweep, describe, report, write):
    """Run a sweep from the command line, and print its report, or ``write`` it into a page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--types", help="names with commas between them; all if not given")
    parser.add_argument("--jobs", type=int, default=1, help="types that run at a time")
    parser.add_argument("--json", type=Path, help="results, to go on with and to add to")
    parser.add_argument("--page", type=Path, help="a page to write the report into")
    options = parser.parse_args()
    records = _resumed(sweep, options, describe)
    print(report(records))
    if options.page:
        write(options.page, records)


def write_below(heading, page, text):
    """Put a text below a heading of a page, in place of all that is there."""
    page.write_text(page.read_text().partition(heading)[0] + heading + "\n" + text)
