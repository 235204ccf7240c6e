"""The parser of ``functx demo``, which loads the demo's packages only when the demo runs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any


def add_demo(commands: Any) -> None:
    """Add ``functx demo``."""
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
    demo.add_argument("--quick", action="store_true", help="use a toy size, which takes seconds")
    demo.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    packages = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}
    missing = [pip for module, pip in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f"functx demo: needs {', '.join(missing)}: pip install 'functx[demo]'", file=sys.stderr
        )
        return 2
    from functx._cli.demo.run import DemoError, run

    try:
        run(args.out, args.device, args.epochs, args.quick)
    except DemoError as error:
        print(f"functx demo: {error}", file=sys.stderr)
        return 2
    return 0
