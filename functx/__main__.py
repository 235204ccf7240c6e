"""The command line: ``functx demo``, ``crosscheck``, ``memory``, ``plan`` and ``doctor``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import functx
from functx import _cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        The exit status: 0; 1 where the answer is no (torch and JAX disagree, no plan fits); 2 where
        the command says on stderr why it can't be done.
    """
    top = argparse.ArgumentParser(
        prog="functx", description="PyTorch transforms that compose the way JAX's do."
    )
    top.add_argument("--version", action="version", version=f"functx {functx.__version__}")
    commands = top.add_subparsers(metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train on digits with per-example clipped gradients, and compare with JAX",
        description="Train a small vision transformer on scikit-learn's handwritten digits with "
        "per-example clipped gradients by vmap(grad(remat(block))), check one batch against JAX, "
        "and measure memory and time with and without remat.",
    )
    demo.add_argument(
        "--device", default="cpu", help="where torch computes: cpu or cuda (default: cpu)"
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("functx-demo"),
        help="folder for the picture, the figures as JSON and the printout (default: functx-demo)",
    )
    demo.add_argument("--epochs", type=int, help="passes over the training images")
    demo.add_argument("--quick", action="store_true", help="a toy size, to see it run")
    demo.set_defaults(run=_demo)
    _cli.add_crosscheck(commands)
    _cli.add_memory(commands)
    _cli.add_plan(commands)
    _cli.add_doctor(commands)
    args = top.parse_args(argv)
    if "run" not in args:
        top.print_help()
        return 0
    return int(args.run(args))


def _demo(args: argparse.Namespace) -> int:
    packages = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}
    missing = [pip for module, pip in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f"functx demo: needs {', '.join(missing)}: pip install 'functx[demo]'", file=sys.stderr
        )
        return 2
    from functx._cli.demo import DemoError, run

    try:
        run(args.out, args.device, args.epochs, args.quick)
    except DemoError as error:
        print(f"functx demo: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
