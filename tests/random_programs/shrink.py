"""Takes away from a program what does not matter to its outcome."""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections.abc import Iterator
from typing import Any

import functx

from .judge import Verdict, judge, warm
from .program import Block, Inner, Line, Program

STAND_INS = {"m": "m0", "v": "v0", "s": "v0.sum()", "i": "idx"}
SIMPLE_ENDS = ("values", "backward", "of the input only")


def apart(program: Program, library: Any = functx) -> Verdict:
    """The verdict of a process of its own, which may end by a signal."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with os.fdopen(writing, "wb") as out:
                pickle.dump(judge(program, library=library), out)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as given:
        data = given.read()
    status = os.waitpid(pid, 0)[1]
    if data:
        return pickle.loads(data)
    return Verdict("crashed", f"the process ended with {os.waitstatus_to_exitcode(status)}")


def _without(wrapper: str) -> list[list[str]]:
    """A wrapper with less in it: none, if it is a region; one without its policy."""
    if not wrapper.startswith("remat("):
        return []
    return [[]] + ([["remat({})"]] if wrapper != "remat({})" else [])


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest things first."""

    def changed() -> tuple[Program, list[list[Any]]]:
        other = copy.deepcopy(program)
        return other, list(other.bodies())

    for n in range(len(program.stack)):
        other = copy.deepcopy(program)
        del other.stack[n]
        yield other
    for end in SIMPLE_ENDS[: (*SIMPLE_ENDS, program.end).index(program.end)]:
        other = copy.deepcopy(program)
        other.end = end
        yield other
    for where, body in enumerate(list(program.bodies())):
        for n, statement in enumerate(body):
            other, bodies = changed()
            del bodies[where][n]
            yield other
            outs = statement.outs if isinstance(statement, Inner) else []
            outs = [statement.out] if isinstance(statement, Line) and statement.out else outs
            lines = [Line(f"{out} = {STAND_INS[out[0]]}") for out in outs if out[0] in STAND_INS]
            if lines and not (isinstance(statement, Line) and statement.text == lines[0].text):
                other, bodies = changed()
                bodies[where][n : n + 1] = lines
                yield other
            if isinstance(statement, Block):
                other, bodies = changed()
                bodies[where][n : n + 1] = bodies[where][n].body
                yield other
            for k, wrapper in enumerate(getattr(statement, "wrappers", [])):
                for less in _without(wrapper):
                    other, bodies = changed()
                    bodies[where][n].wrappers[k : k + 1] = less
                    yield other
    for out in re.findall(r"\b[mvs]\d+\b", program.result):
        if program.result != out:
            other = copy.deepcopy(program)
            other.result = out
            yield other


def smallest(program: Program, library: Any = functx) -> tuple[Program, Verdict]:
    """A program none of whose parts can go without another outcome, and its verdict."""
    warm()
    verdict = apart(program, library)
    found = True
    while found:
        found = False
        for other in smaller(program):
            now = apart(other, library)
            if now.outcome == verdict.outcome and now.why[:20] == verdict.why[:20]:
                program, verdict, found = other, now, True
                break
    return program, verdict
