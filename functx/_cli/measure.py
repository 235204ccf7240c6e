"""``functx memory`` and ``functx plan``: measure a function's memory, and plan to need less."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functx import memory
from functx._budget import plan
from functx._cli.target import CommandError, add_options, found, status, write
from functx._core import checked_budget, has_derivatives, tree
from functx._insight import labels

_EXAMPLES = """\
examples:
  functx memory net.py:loss --args 'float32[64,128]'
  functx memory package.model:Model --inputs make_inputs --plot memory.png
  functx plan net.py:blocks --args 'float32[64,128]' --budget 2GiB --json plan.json

exit status: 0; 1 if no plan fits; 2 if the function can't be measured."""


def add_memory(commands: Any) -> None:
    """Add ``functx memory``."""
    parser = _added(
        commands,
        "memory",
        "measure the peak of a forward and a backward pass, and what is live there, line by line",
    )
    parser.add_argument(
        "--forward", action="store_true", help="measure only the forward pass (default: both)"
    )
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw live bytes over operations")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures as JSON")
    parser.set_defaults(run=functools.partial(status, "memory", _memory))


def add_plan(commands: Any) -> None:
    """Add ``functx plan``."""
    parser = _added(
        commands,
        "plan",
        "choose what to recompute, so that a forward and a backward pass fit in a budget",
    )
    parser.add_argument(
        "--budget",
        required=True,
        help="bytes such as 2GiB, or a number up to 1.0: a share of the peak without regions",
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="save the plan for functx.Plan.load"
    )
    parser.set_defaults(run=functools.partial(status, "plan", _plan))


def _added(commands: Any, name: str, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    return parser


def _memory(options: argparse.Namespace) -> int:
    f, args, kwargs = found(options)
    if not callable(f):
        raise CommandError(
            f"{options.function} is a {type(f).__name__}; name a function or a module (only "
            "functx plan takes a list of blocks)"
        )
    args, kwargs, leaves = _differentiated(f, args, kwargs)
    run = f if options.forward else _gradients(f, leaves)
    profile = memory.profile(run, *args, **kwargs)
    print(profile)
    figures = {
        "peak": profile.peak,
        "kept": profile.kept,
        "returned": profile.returned,
        "operations": dict(profile.operations),
        "at_peak": [asdict(held) | {"dtype": str(held.dtype)} for held in profile.holders],
    }
    text = json.dumps(figures, indent=2, default=str) + "\n"
    write(options.plot, profile.plot)
    write(options.json, lambda path: path.write_text(text))
    return 0


def _plan(options: argparse.Namespace) -> int:
    f, args, kwargs = found(options)
    if kwargs:
        raise CommandError(
            "a plan takes positional arguments only; let --inputs return a tuple, not a dict"
        )
    text = options.budget
    is_number = re.fullmatch(r"[\d.]+", text) is not None
    try:
        budget = checked_budget(ast.literal_eval(text) if is_number else text, "--budget")
    except (TypeError, ValueError, SyntaxError) as error:
        raise CommandError(str(error)) from None
    args, _, _ = _differentiated(f, args, {})
    try:
        found_plan = plan(f, *args, budget=budget)
    except ValueError as error:
        print(f"functx plan: {str(error).removeprefix('functx.plan: ')}", file=sys.stderr)
        return 1
    print(found_plan)
    write(options.json, found_plan.save)
    return 0


def _differentiated(f: Any, args: Any, kwargs: Any) -> tuple[Any, Any, list[Tensor]]:
    """The arguments, which now require grad if they can, and all tensors to differentiate."""

    def leaf(x: Any) -> Any:
        return x.detach().requires_grad_() if has_derivatives(x) else x

    args, kwargs = tree.map_(leaf, (args, kwargs))
    reached = {id(t): t for t, _ in labels(f, args, kwargs) if t.requires_grad}
    return args, kwargs, [*reached.values()]


def _gradients(f: Any, leaves: list[Tensor]) -> Callable[..., Any]:
    """A function that computes the gradients of the sum of all tensors that ``f`` returns."""
    if not leaves:
        raise CommandError("no argument can be differentiated; use --forward")

    def gradients(*args: Any, **kwargs: Any) -> Any:
        outs = [t for t in tree.leaves(f(*args, **kwargs)) if isinstance(t, Tensor)]
        total = sum(t.real.sum() for t in outs if t.requires_grad)
        if not isinstance(total, Tensor):
            raise CommandError("the result of the function has no gradient; use --forward")
        return torch.autograd.grad(total, leaves, allow_unused=True)

    return gradients
