"""``functx crosscheck``: a function named on the command line, run in torch and in JAX."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import operator
import re
import sys
from pathlib import Path
from typing import Any

import torch

AGREE, DISAGREE, FAILED = 0, 1, 2
_SPEC = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d, ]*)\](?:<(?P<below>\d+))?$")

DESCRIPTION = """\
Run a torch function or module and its derivatives in torch and in JAX, and compare: values,
gradients, bytes kept by remat regions, products recomputed, memory. Where numbers differ, the first
operation that does is named with its line of code."""

EPILOG = """\
examples:
  functx crosscheck net.py:loss --inputs make_inputs
  functx crosscheck package.model:Model --args 'float32[4,3]' --transforms value grad hessian
  functx crosscheck net.py:loss --inputs make_inputs --in-dims None,0 --html report.html

exit status: 0 if torch and JAX agree, 1 if they don't, 2 if they could not be compared."""


class CommandError(Exception):
    """What was asked for can't be done; the message says why, and what to do."""


def add_to(commands: Any) -> None:
    """Add the command and its options to those of a parser."""
    parser = commands.add_parser(
        "crosscheck",
        help="compare a torch function with itself in JAX: values, derivatives, memory",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "function",
        metavar="MODULE:NAME",
        help="the function or module: a Python module or a .py file, a colon, and the name in it; "
        "a class of modules is called without arguments",
    )
    parser.add_argument(
        "--inputs",
        metavar="[MODULE:]NAME",
        help="a function that returns the arguments (a tuple; a dictionary is keyword arguments; "
        "anything else is the only argument), or the arguments themselves; in the function's "
        "module if none is named (default: `inputs` there, if it has it)",
    )
    parser.add_argument(
        "--args",
        nargs="+",
        metavar="ARG",
        help="the arguments: 'float32[4,3]' is a tensor of normal numbers of that shape, "
        "'int64[5]<10' of integers below 10, anything else a Python literal",
    )
    parser.add_argument(
        "--transforms",
        nargs="+",
        metavar="T",
        help="what to compare: value, grad, vmap(grad), jvp, hvp, jacrev, jacfwd, hessian "
        "(default: value and gradients)",
    )
    parser.add_argument(
        "--argnums",
        type=_literal,
        default=0,
        help="which arguments derivatives are taken in: a number or a tuple; of a module, 0 is its "
        "parameters (default: 0)",
    )
    parser.add_argument(
        "--in-dims",
        type=_literal,
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
    parser.add_argument("--seed", type=int, default=0, help="torch.manual_seed (default: 0)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures as JSON")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page with all figures")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"{text!r} is no Python literal, such as None,0") from None


def run(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status.
    """
    try:
        report = _report(options)
        print(report)
        for path, write in ((options.json, report.to_json), (options.html, report.to_html)):
            if path is not None:
                print(f"written: {write(path)}")
    except CommandError as error:
        print(f"functx crosscheck: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"functx crosscheck: can't write {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED
    problems = report.problems()
    for problem in problems:
        print(f"functx crosscheck: {problem}", file=sys.stderr)
    return DISAGREE if problems else AGREE


def _report(options: argparse.Namespace) -> Any:
    if options.inputs is not None and options.args is not None:
        raise CommandError("--inputs and --args both say what the arguments are; give one of them")
    torch.manual_seed(options.seed)
    module, f = _named(options.function, None)
    if isinstance(f, type) and issubclass(f, torch.nn.Module):
        try:
            f = f()
        except TypeError as error:
            raise CommandError(
                f"{options.function} can't be made without arguments ({error}); name a function or"
                " a variable that holds the module"
            ) from None
    args, kwargs = _inputs(options, module)
    if not args:
        bound = inspect.signature(f).bind(**kwargs)
        args, kwargs = bound.args, bound.kwargs
    names = ("transforms", "argnums", "in_dims", "rtol", "atol", "repeats")
    try:
        from functx.compat import crosscheck
    except ImportError as error:
        raise CommandError(str(error)) from None
    try:
        return crosscheck(f, *args, kwargs=kwargs, **{n: getattr(options, n) for n in names})
    except Exception as error:
        # One note is about tracebacks, of which there are none here.
        notes = [n for n in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in n]
        raise CommandError("\n".join([f"{type(error).__name__}: {error}", *notes])) from error


def _named(text: str, module: Any) -> tuple[Any, Any]:
    """The module and the object that ``MODULE:NAME`` says, or ``NAME`` in a module."""
    where, colon, name = text.rpartition(":")
    if colon:
        module = _module(where)
    elif module is None:
        raise CommandError(
            f"{text!r} names no function: say where, as in module:function or file.py:function"
        )
    try:
        return module, operator.attrgetter(name)(module)
    except AttributeError:
        public = ", ".join(sorted(n for n in vars(module) if not n.startswith("_")))
        raise CommandError(
            f"{module.__name__} has no {name!r}; it has {public or 'nothing'}"
        ) from None


def _module(where: str) -> Any:
    path, name = Path(where), Path(where).stem
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise CommandError(f"there is no file {where}")
    sys.path.insert(0, str(path.parent.resolve() if is_file else Path.cwd()))
    try:
        if not is_file:
            return importlib.import_module(where)
        # By its path: it may be named like a module that is loaded, ``random.py``.
        while (module := sys.modules.get(name)) is not None:
            if getattr(module, "__file__", None) == str(path.resolve()):
                return module
            name += "_"
        spec: Any = importlib.util.spec_from_file_location(name, path.resolve())
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == where
        hint = "; is it another folder, or a file (file.py:name)?" if missing else ""
        raise CommandError(
            f"importing {where} raised {type(error).__name__}: {error}{hint}"
        ) from error


def _inputs(options: argparse.Namespace, module: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if options.args is not None:
        return tuple(map(_argument, options.args)), {}
    if options.inputs is None and not hasattr(module, "inputs"):
        raise CommandError(
            f"what to call {options.function} with? Give --args (such as 'float32[4,3]'), or"
            " --inputs with a function that returns the arguments, or define `inputs` next to it"
        )
    name = options.inputs or "inputs"
    found = _named(name, module)[1]
    if callable(found):
        try:
            found = found()
        except Exception as error:
            raise CommandError(f"{name}() raised {type(error).__name__}: {error}") from error
    if isinstance(found, dict):
        return (), found
    return (found if isinstance(found, tuple) else (found,)), {}


def _argument(text: str) -> Any:
    match = _SPEC.match(text)
    if match is None:
        try:
            return _literal(text)
        except argparse.ArgumentTypeError:
            raise CommandError(
                f"--args {text!r} is neither a tensor such as 'float32[4,3]' or 'int64[5]<10' nor a"
                " Python literal"
            ) from None
    dtype = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CommandError(f"--args {text!r}: torch has no dtype {match['dtype']!r}")
    shape = [int(size) for size in match["shape"].replace(" ", "").split(",") if size]
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(int(match["below"] or 2), shape).to(dtype)
