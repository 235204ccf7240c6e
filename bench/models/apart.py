"""Judges a model type in a process of its own, so that a crash or a hang costs only that type."""

import json
import logging
import multiprocessing
import re
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

import torch

from functx._command.small_models import TYPES


def line(error, length=200):
    """An error in one line of a table."""
    text = " ".join(str(error).split()).replace("|", "\\|")
    return re.sub(r"/\S*/", "", text)[:length]


def parts(judge, name, limit, start):
    """Yields what ``judge(name)`` yields, and at the end why there is no more, or None.

    Processes ``start`` by ``"fork"`` or ``"spawn"``, and have ``limit`` seconds.
    """
    context = multiprocessing.get_context(start)
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


def resumed(sweep, options, describe):
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
