"""Takes away from a program what does not matter to its outcome."""

from __future__ import annotations

import os
import pickle
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .judge import Verdict, judge, warm
from .program import Program

STAND_INS = {"m": "m0", "v": "v0", "s": "v0.sum()", "i": "idx"}
SIMPLE_ENDS = ("values", "backward", "of the input only")


def forked(function: Callable[[], Any]) -> Callable[[], int]:
    """Start a process for it; the result waits for its exit code."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def apart(program: Program, library: Any) -> Verdict:
    """The verdict of a process of its own, which may end by a signal."""
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        code = forked(lambda: path.write_bytes(pickle.dumps(judge(program, library=library))))()
        ended = Verdict("crashed", f"the process ended with {code}")
        return ended if code else pickle.loads(path.read_bytes())


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less; not all of them run."""
    stack, lines = program.stack, "\n".join(map(str, program.body)).splitlines()
    for n in range(len(stack)):
        yield replace(program, stack=stack[:n] + stack[n + 1 :])
    for end in SIMPLE_ENDS[: (*SIMPLE_ENDS, program.end).index(program.end)]:
        yield replace(program, end=end)
    for n, line in enumerate(lines):
        pad = re.match(" *", line)[0]
        end = n + 1
        while end < len(lines) and lines[end].startswith(pad + " "):
            end += 1
        names = re.findall(r"\b[mvsi]\d+\b", line.split(" = ")[0]) if " = " in line else []
        simple = [f"{pad}{name} = {STAND_INS[name[0]]}" for name in names]
        without = re.sub(r"remat\((f\d+)\)", r"\1", line)
        without = re.sub(r"remat\((f\d+), policy=.*?\)\(", r"\1(", without)
        dedented = [inner[4:] for inner in lines[n + 1 : end]]
        for less in ([], simple, dedented, [without, *lines[n + 1 : end]]):
            if less != lines[n:end]:
                yield replace(program, body=lines[:n] + less + lines[end:])


def smallest(program: Program, library: Any) -> tuple[Program, Verdict]:
    """A program none of whose parts can go without another outcome, and its verdict."""
    warm()
    verdict = apart(program, library)
    while True:
        for other in smaller(program):
            now = apart(other, library)
            if now.outcome == verdict.outcome and now.why[:20] == verdict.why[:20]:
                program, verdict = other, now
                break
        else:
            return program, verdict
