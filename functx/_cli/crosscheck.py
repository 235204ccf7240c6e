"""``functx crosscheck``: a function named on the command line, run in torch and in JAX."""

from __future__ import annotations

import argparse
import functools
import inspect
import logging
import sys
from pathlib import Path
from typing import Any

from functx._cli.target import CommandError, add_options, found, literal, status, write

DESCRIPTION = """\
Run a torch function or module and its derivatives in torch and in JAX, and compare: values,
gradients, bytes kept by remat regions, products recomputed, memory. Where numbers differ, the first
operation that does is named with its line of code."""

EPILOG = """\
examples:
  functx crosscheck net.py:loss --inputs make_inputs
  functx crosscheck package.model:Model --args 'float32[4,3]' --transforms value grad hessian
  functx crosscheck net.py:loss --inputs make_inputs --in-dims None,0 --html report.html
  functx crosscheck hf:llama

exit status: 0 if torch and JAX agree, 1 if they don't, 2 if they could not be compared."""


def add_crosscheck(commands: Any) -> None:
    """Add the command and its options to those of a parser."""
    parser = commands.add_parser(
        "crosscheck",
        help="compare a torch function with itself in JAX: values, derivatives, memory",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=functools.partial(status, "crosscheck", run))
    add_options(parser)
    parser.add_argument(
        "--transforms",
        nargs="+",
        metavar="T",
        help="what to compare: value, grad, vmap(grad), jvp, hvp, jacrev, jacfwd, hessian "
        "(default: value and gradients); with blanks or commas between",
    )
    parser.add_argument(
        "--argnums",
        type=literal,
        default=0,
        help="which arguments derivatives are taken in: a number or a tuple; of a module, 0 is its "
        "parameters (default: 0)",
    )
    parser.add_argument(
        "--in-dims",
        type=literal,
        help="the function is that of one example: which axis of each argument numbers the "
        "examples, such as None,0",
    )
    parser.add_argument(
        "--rtol",
        type=float,
        help="the difference allowed, relative to a tensor's largest entry (default: by dtype, "
        "2e-5 in float32, and more, up to 0.1, where torch itself is farther from float64)",
    )
    parser.add_argument(
        "--atol", type=float, default=0.0, help="the absolute difference allowed too (default: 0)"
    )
    parser.add_argument(
        "--repeats", type=int, default=0, help="how many runs to time (default: 0, no times)"
    )
    parser.add_argument(
        "--compiled",
        nargs="?",
        const=True,
        default=False,
        metavar="BACKEND",
        help="compare eager, the trace of functx.jit, what it compiles (by BACKEND, default: its "
        "own), and JAX, four in a row",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures as JSON")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page with all figures")


def run(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status.
    """
    report = _report(options)
    print(report)
    write(options.json, report.to_json)
    write(options.html, report.to_html)
    problems = report.problems()
    for problem in problems:
        print(f"functx crosscheck: {problem}", file=sys.stderr)
    return int(bool(problems))


def _report(options: argparse.Namespace) -> Any:
    f, args, kwargs = found(options)
    if not args:
        bound = inspect.signature(f).bind(**kwargs)
        args, kwargs = bound.args, bound.kwargs
    if options.transforms is not None:
        options.transforms = [t for t in ",".join(options.transforms).split(",") if t]
    names = ("transforms", "argnums", "in_dims", "rtol", "atol", "repeats", "compiled")
    try:
        from functx.compat import crosscheck
    except ImportError as error:
        raise CommandError(str(error)) from None
    if sys.stderr.isatty():
        logging.basicConfig(format="functx crosscheck: %(message)s")
        logging.getLogger("functx").setLevel(logging.INFO)
    return crosscheck(f, *args, kwargs=kwargs, **{n: getattr(options, n) for n in names})
