"""The command line: ``functx demo`` and ``functx crosscheck``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from functx.compat import _command


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, one subparser a command."""
    top = argparse.ArgumentParser(
        prog="functx", description="PyTorch transforms that compose the way JAX's do."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
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
    demo.add_argument("--epochs", type=_positive, help="passes over the training images")
    demo.add_argument("--quick", action="store_true", help="a toy size, to see it run")
    demo.set_defaults(run=_demo)
    crosscheck = commands.add_parser(
        "crosscheck",
        help="compare a torch function with itself in JAX: values, derivatives, memory",
        description=_command.DESCRIPTION,
        epilog=_command.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _command.add_arguments(crosscheck)
    crosscheck.set_defaults(run=_command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Returns:
        The exit status: 0, or 1 where the command says on stderr why it can't be done.
    """
    args = parser().parse_args(argv)
    return int(args.run(args))


def _demo(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from functx._demo.run import DemoError, DemoSettings, run

    settings = DemoSettings(out=args.out, device=args.device)
    settings = settings.quick() if args.quick else settings
    if args.epochs is not None:
        settings = replace(settings, epochs=args.epochs)
    try:
        run(settings)
    except DemoError as error:
        print(f"functx demo: {error}", file=sys.stderr)
        return 1
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main())
