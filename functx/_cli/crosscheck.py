"""``functx crosscheck``: run a function in torch and in JAX, and compare the results."""

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
Run a torch function or module and its derivatives in torch and in JAX, and compare values,
gradients, the bytes that remat regions save, the matrix products that they recompute, and memory.
If numbers differ, the first operation with another result is named, with its line of code."""

EPILOG = """\
examples:
  functx crosscheck net.py:loss --inputs make_inputs
  functx crosscheck package.model:Model --args 'float32[4,3]' --transforms value grad hessian
  functx crosscheck net.py:loss --inputs make_inputs --in-dims None,0 --html report.html
  functx crosscheck hf:llama

exit status: 0 if torch and JAX agree, 1 if they don't, 2 if they can't be compared."""


def add_crosscheck(commands: Any) -> None:
    """Add the command with its options."""
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
        "(default: value and gradients); separated by blanks or commas",
    )
    parser.add_argument(
        "--argnums",
        type=literal,
        default=0,
        help="which arguments to differentiate: a number or a tuple; for a module, 0 means its "
        "parameters (default: 0)",
    )
    parser.add_argument(
        "--in-dims",
        type=literal,
        help="if the function takes one example: the axis of each argument along which the "
        "examples lie, such as None,0",
    )
    parser.add_argument(
        "--rtol",
        type=float,
        help="the largest difference allowed, relative to a tensor's largest entry (default: by "
        "dtype, 2e-5 in float32; more, up to 0.1, where torch itself differs more from float64)",
    )
    parser.add_argument(
        "--atol", type=float, default=0.0, help="an absolute difference to allow (default: 0)"
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
        help="compare four ways to run it: in eager, the trace of functx.jit, its compiled code "
        "(by BACKEND; default: that of functx.jit), and JAX",
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
