"""Variants of a bench: each in a process of its own, under a limit of time.

Memory that one variant took, compiled or cached can't be seen in the figures of another; and a
variant that fails, or takes too long, is a row that says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench._common import RESULTS, Result, short_of_memory

ROOT = Path(__file__).parent.parent.parent
MARK = "FIGURES "


@dataclass(frozen=True)
class Setting:
    """Where and how large a variant runs.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        toy: Whether sizes are those that a test can wait for.
        given: What earlier variants found.
    """

    device: str = "cpu"
    toy: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)


Variant = Callable[[Setting], dict[str, Any]]


def run_here(variant: Variant, setting: Setting) -> dict[str, Any]:
    """The figures of a variant; why there are none under ``error``."""
    try:
        return variant(setting)
    except ImportError as error:
        return {"error": f"{error.name or error} is not installed"}
    except Exception as error:
        if short_of_memory(error):
            return {"error": "out of memory"}
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}


def run_apart(module: str, name: str, setting: Setting, seconds: float) -> dict[str, Any]:
    """The same in a process of its own, which is ended after so many seconds."""
    command = [sys.executable, "-m", "bench.gpu._variants", module, name]
    command.append(json.dumps(asdict(setting)))
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=ROOT,
            env=os.environ | surroundings(setting.device),
        )
    except subprocess.TimeoutExpired as error:
        found = _last_figures(error.stdout)
        return found | {"error": f"ended after {seconds:.0f} s"}
    found = _last_figures(run.stdout)
    if not found:
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        return {"error": f"ended: {last[:200]}"}
    return found


def surroundings(device: str) -> dict[str, str]:
    """The environment of a process that measures: JAX takes memory as it needs it."""
    found = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return found if device == "cuda" else found | {"JAX_PLATFORMS": "cpu"}


def without_autotuning() -> None:
    """XLA, which is not loaded yet, takes its first kernels: to find the fastest takes minutes."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"


def so_far(figures: dict[str, Any]) -> None:
    """Hand figures over before the end: the last ones count if time runs out."""
    print(MARK + json.dumps(figures), flush=True)


def _last_figures(output: str | bytes | None) -> dict[str, Any]:
    text = output.decode() if isinstance(output, bytes) else output or ""
    lines = [line for line in text.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1].removeprefix(MARK)) if lines else {}


@dataclass(frozen=True)
class Arguments:
    """What the command line of such a bench says.

    Attributes:
        setting: For the variants.
        seconds: For all of them.
        apart: Whether each has a process of its own.
        out: Where to write; ``None`` for nowhere.
    """

    setting: Setting
    seconds: float
    apart: bool
    out: Path | None

    def write(self, result: Result) -> None:
        """Write the figures down, if there is a place for them."""
        if self.out is not None:
            result.write(self.out)


def arguments(name: str, claim: str, seconds: float, argv: list[str] | None = None) -> Arguments:
    """Read the command line of a bench.

    Raises:
        SystemExit: There is no CUDA device, and neither ``--toy`` nor another was asked for.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.gpu.{name}", description=claim)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--toy", action="store_true", help="small, to see that it runs")
    parser.add_argument("--seconds", type=float, default=seconds, help="for all variants together")
    parser.add_argument("--here", action="store_true", help="all variants in this process")
    parser.add_argument("--out", type=Path, help="folder for the figures")
    found = parser.parse_args(argv)
    if found.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --toy shows that it runs")
    if found.device == "cpu" and not found.toy:
        parser.error("on the CPU only with --toy: its figures would mean nothing")
    out = found.out or (None if found.toy else RESULTS / "cuda")
    return Arguments(Setting(found.device, found.toy), found.seconds, not found.here, out)


class Runner:
    """Runs the variants of a bench until its time is over.

    Args:
        module: The bench's, by its dotted name.
        variants: Its variants, by name.
        found: What the command line says.
    """

    def __init__(self, module: str, variants: Mapping[str, Variant], found: Arguments) -> None:
        self._module, self._variants, self._found = module, variants, found
        self._end = time.monotonic() + found.seconds
        self.device = torch.device(found.setting.device)

    def run(self, name: str, **given: Any) -> dict[str, Any]:
        """The figures of one variant, which is told what others found."""
        setting = replace(self._found.setting, given=given)
        left = self._end - time.monotonic()
        if left < 1:
            return {"error": "no time left"}
        if self._found.apart:
            return run_apart(self._module, name, setting, left)
        return run_here(self._variants[name], setting)


def errors(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """A sentence for each row without figures."""
    return [f"{row[key]}: {row['error']}." for row in rows if "error" in row]


if __name__ == "__main__":
    _, module, name, text = sys.argv
    bench = importlib.import_module(module)
    so_far(run_here(bench.VARIANTS[name], Setting(**json.loads(text))))
