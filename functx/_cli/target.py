"""Find the function or module that a command names as ``MODULE:NAME``, and its arguments."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import operator
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from functx._models import apply_remat

_SPEC = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d, ]*)\](?:<(?P<below>\d+))?$")


FAILED = 2  # the exit status of a command that raised an error


class CommandError(Exception):
    """A command can't be run. The message says why, and what to do."""


def status(command: str, run: Callable[[Any], int], options: argparse.Namespace) -> int:
    """Run a command; returns its exit status, or `FAILED` with a message on stderr."""
    try:
        for path in (getattr(options, name, None) for name in ("json", "plot", "html")):
            # Check this before a long measurement.
            if path is not None and not path.parent.is_dir():
                raise CommandError(f"can't write {path}: No such file or directory")
            if str(path) == "-":
                raise CommandError("can't write to '-': pass the name of a file")
        return run(options)
    except CommandError as error:
        message = str(error)
    except Exception as error:
        if getattr(options, "traceback", False):
            traceback.print_exception(error)
            return FAILED
        # JAX adds a note about tracebacks, but no traceback is printed here.
        notes = [n for n in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in n]
        line = _line_of(error)
        message = "\n".join([f"{type(error).__name__}: {error}", *notes, *line])
    print(f"functx {command}: {message}", file=sys.stderr)
    return FAILED


def _line_of(error: Exception) -> list[str]:
    """The innermost line of user code in the traceback of an error, for a message."""
    packages = [importlib.import_module(name) for name in ("torch", "functx", "functx.compat")]
    folders = [str(Path(str(package.__file__)).parent) for package in packages]
    libraries = (*folders, sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if not f.filename.startswith((*libraries, "<"))]
    users = [f for f in users if Path(f.filename).name != "functx"]  # the script `functx` itself
    return [f"at {f.filename}:{f.lineno} in {f.name} (--traceback shows all)" for f in users[-1:]]


def write(path: Path | None, writer: Callable[[Path], Any]) -> None:
    """Write a file, if a path is given, and print its name."""
    if path is None:
        return
    try:
        writer(path)
    except OSError as error:
        raise CommandError(f"can't write {error.filename}: {error.strerror}") from error
    print(f"written: {path}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the function and its arguments."""
    parser.add_argument(
        "function",
        metavar="MODULE:NAME",
        help="the function or module: a Python module or a .py file, a colon, and the name in it; "
        "a class of modules is called without arguments; hf:NAME is a small model of that type or "
        "class of Hugging Face transformers, with suitable inputs, in eval mode",
    )
    parser.add_argument(
        "--inputs",
        metavar="[MODULE:]NAME",
        help="the arguments, or a function that returns them: a tuple, a dict of keyword "
        "arguments, or a single argument; looked up in the function's module if no module is "
        "named (default: `inputs` in that module, if there is one)",
    )
    parser.add_argument(
        "--args",
        nargs="+",
        metavar="ARG",
        help="the arguments: 'float32[4,3]' is a tensor of normal numbers of that shape, "
        "'int64[5]<10' of integers below 10, anything else a Python literal",
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        "--remat",
        metavar="WHERE",
        help="first make these submodules regions, by functx.apply_remat: for example 'layers.*', "
        "or gradient_checkpointing for the layers that Hugging Face would checkpoint",
    )
    parser.add_argument("--seed", type=int, default=0, help="torch.manual_seed (default: 0)")


def found(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function or module, its arguments, and keyword arguments.

    Raises:
        CommandError: something can't be found or constructed.
    """
    if options.inputs is not None and options.args is not None:
        raise CommandError("use either --inputs or --args, not both")
    torch.manual_seed(options.seed)
    if options.function.startswith("hf:"):
        return *_of_hugging_face(options.function[3:], options.remat), {}
    module, f = _named(options.function, None)
    if isinstance(f, type) and issubclass(f, torch.nn.Module):
        try:
            f = f()
        except TypeError as error:
            raise CommandError(
                f"{options.function} can't be constructed without arguments ({error}); name a "
                "function or a variable that contains the module"
            ) from None
    if options.remat is not None:
        apply_remat(f, options.remat)
    return f, *_inputs(options, module)


def _of_hugging_face(name: str, remat: str | None) -> tuple[Any, tuple[Any, ...]]:
    try:
        from functx.compat.testing.small_models import loss_of
    except ImportError as error:
        raise CommandError(f"hf:{name} needs transformers: {error}") from None
    try:
        return loss_of(name, remat)
    except (LookupError, ValueError) as error:
        raise CommandError(f"hf:{name}: {error}") from None


def literal(text: str) -> Any:
    """Parse an option that is a Python literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a Python literal, such as None,0"
        ) from None


def _named(text: str, module: Any) -> tuple[Any, Any]:
    """The module and the object for ``MODULE:NAME``, or for ``NAME`` in ``module``."""
    where, colon, name = text.rpartition(":")
    if colon:
        module = _module(where)
    elif module is None:
        raise CommandError(
            f"{text!r} does not name a module: write module:function or file.py:function"
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
        # The file may have the name of a module that is loaded, such as ``random.py``.
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
        hint = "; is it in another folder, or is it a file (file.py:name)?" if missing else ""
        raise CommandError(
            f"importing {where} raised {type(error).__name__}: {error}{hint}"
        ) from error


def _inputs(options: argparse.Namespace, module: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if options.args is not None:
        return tuple(map(_argument, options.args)), {}
    if options.inputs is None and not hasattr(module, "inputs"):
        raise CommandError(
            f"there are no arguments for {options.function}. Pass --args (such as 'float32[4,3]'), "
            "or --inputs with a function that returns the arguments, or define `inputs` in the "
            "same module"
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
            return literal(text)
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
