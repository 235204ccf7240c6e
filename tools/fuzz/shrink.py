"""``python -m tools.fuzz.shrink SEED``: a program less what does not matter, and why."""

import pickle
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tools.fuzz.judge import Verdict, judge, warm
from tools.fuzz.run import FORK
from tools.fuzz.writer import write

STAND_INS = {"m": "m0", "v": "v0", "s": "v0.sum()", "i": "idx"}
SIMPLE_ENDS = ("values", "backward", "of the input only")


def apart(program):
    """The verdict of a process of its own, which may end by a signal."""
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        process = FORK.Process(target=lambda: path.write_bytes(pickle.dumps(judge(program))))
        process.start()
        process.join()
        if process.exitcode:
            return Verdict("crashed", f"the process ended with {process.exitcode}")
        return pickle.loads(path.read_bytes())


def smaller(program):
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
        without = re.sub(r"remat\((f\d+)(, policy=.*?)?\)\(", r"\1(", line)
        dedented = [inner[4:] for inner in lines[n + 1 : end]]
        for less in ([], simple, dedented, [without, *lines[n + 1 : end]]):
            if less != lines[n:end]:
                yield replace(program, body=lines[:n] + less + lines[end:])


def smallest(program, verdict):
    for other in smaller(program):
        now = apart(other)
        if now.outcome == verdict.outcome and now.why[:20] == verdict.why[:20]:
            return smallest(other, now)
    return program, verdict


if __name__ == "__main__":
    warm()
    program = write(int(sys.argv[1]))
    program, verdict = smallest(program, apart(program))
    print(f"{program}\n# {verdict.outcome}: {verdict.why}\n{verdict.trace}")
