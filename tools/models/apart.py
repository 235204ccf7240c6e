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

import functx
from functx.compat.testing.small_models import TYPES


def line(error, length=200):
    """An error in one line of a table."""
    text = " ".join(str(error).split()).replace("|", "\\|")
    return re.sub(r"/\S*/", "", text)[:length]


class NoLayers(ValueError):
    """A model has no list of layers."""


def with_regions(model):
    """The layers of a model, made regions: those that transformers marks, or its largest list."""
    try:
        functx.apply_remat(model, "gradient_checkpointing")
    except ValueError:
        found = [(n, m, sum(p.numel() for p in m.parameters())) for n, m in model.named_modules()]
        for kind in (torch.nn.ModuleList, torch.nn.Sequential):
            lists = [
                (size, name)
                for name, m, size in found
                if type(m) is kind and not any(type(part) is kind for part in m)
            ]
            if lists:
                functx.apply_remat(model, f"{max(lists)[1]}.*")
                break
        else:
            raise NoLayers("no list of layers") from None
    return [model.get_submodule(name) for name in functx.remat_regions(model)]


def settle(model):
    """No layer is skipped, and no statistics of batches are kept: transforms refuse both."""
    for part in (*model.modules(), *(m.config for m in model.modules() if hasattr(m, "config"))):
        for key in [key for key in vars(part) if key.endswith("layerdrop")]:
            setattr(part, key, 0.0)
        if getattr(part, "track_running_stats", False):
            part.eval()


def parts(judge, name, limit, *args):
    """Yields what ``judge(name, *args)`` yields, and at the end why there is no more, or None.

    It has ``limit`` seconds.
    """
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(end, judge, name, *args), daemon=True)
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


def _child(pipe, judge, name, *args):
    sys.stdout = sys.stderr = None
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        for part in judge(name, *args):
            pipe.send((True, part))
        pipe.send((False, None))
    except Exception as error:
        pipe.send((False, ("raised", line(error))))


def sweep(record, work, jobs):
    """Yields ``record(*item)`` of each item of work, which is by default each type."""
    work = [(name,) for name in TYPES] if work is None else work
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda item: record(*item), work)


def _read(file):
    """Records by their types; lines of one type are one record."""
    records = {}
    for text in file.read_text().splitlines() if file and file.exists() else ():
        record = json.loads(text)
        records.setdefault(record["type"], {}).update(record)
    return records


def _resumed(sweep, options, describe, columns):
    """The records of a sweep, those in the file ``options.json`` first; each is added to it."""
    file = options.json
    records = _read(file)
    names = options.types.split(",") if options.types else TYPES
    work = []
    for name in names:
        known = records.get(name, {})
        work += [] if known else [(name,)]
        work += [(name, column) for column in columns if column not in known]
    for record in sweep(work, options.jobs):
        records.setdefault(record["type"], {}).update(record)
        print(f"{len(records):4} {record['type']:28} {describe(record)}", flush=True)
        if file:
            with file.open("a") as to:
                to.write(json.dumps(record) + "\n")
    if file:
        file.write_text("".join(json.dumps(record) + "\n" for record in records.values()))
    return [*records.values()]


def main(description, sweep, describe, report, write, columns=()):
    """Run a sweep from the command line, and print its report, or ``write`` it into a page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--types", help="names with commas between them; all if not given")
    parser.add_argument("--jobs", type=int, default=1, help="types that run at a time")
    parser.add_argument("--json", type=Path, help="results, to go on with and to add to")
    parser.add_argument("--page", type=Path, help="a page to write the report into")
    if columns:
        also = f"columns besides, with commas between them: {', '.join(columns)}"
        parser.add_argument("--with", dest="columns", default="", help=also)
    options = parser.parse_args()
    chosen = [c for c in getattr(options, "columns", "").split(",") if c]
    records = _resumed(sweep, options, describe, chosen)
    print(report(records))
    if options.page:
        write(options.page, records)


def write_below(heading, page, text):
    """Put a text below a heading of a page, in place of all that is there."""
    page.write_text(page.read_text().partition(heading)[0] + heading + "\n" + text)
