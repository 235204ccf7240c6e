"""The command line: ``functx demo``, ``crosscheck``, ``memory``, ``plan`` and ``doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import functx
from functx import _cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        The exit status: 0; 1 if the answer is no (torch and JAX disagree, or no plan fits); 2 if
        the command can't be run, with the reason on stderr.
    """
    top = argparse.ArgumentParser(
        prog="functx", description="PyTorch transforms that compose the way JAX's do."
    )
    top.add_argument("--version", action="version", version=f"functx {functx.__version__}")
    commands = top.add_subparsers(metavar="command")
    _cli.add_demo(commands)
    _cli.add_crosscheck(commands)
    _cli.add_memory(commands)
    _cli.add_plan(commands)
    _cli.add_doctor(commands)
    args = top.parse_args(argv)
    if "run" not in args:
        top.print_help()
        return 0
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
