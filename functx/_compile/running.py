"""Notes which code runs in a trace, and tells names in it and user code from library code.

NOTE [what ran]
A search from a large model reaches thousands of functions that no call runs. Guards for all names
in these would cost time at each call, and the graph would seem to depend on a counter that one of
them keeps. So functx notes the code objects that run in a trace, and guards only names in these.
From Python 3.12 on it uses `sys.monitoring`, which reports each code object once and is nearly
free. Before 3.12 it uses `sys.settrace`, which is called at each Python call, except below
operators of torch (`graphs.unnoted`). The trace function of a debugger or of coverage still runs.

A limit: code that runs in other threads is not noted.
"""

from __future__ import annotations

import copy
import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from functx._core import is_internal
from functx._torch import graphs

_STDLIB_NAMES = sys.stdlib_module_names
LIBRARIES = {"torch", "functx", "numpy", "jax", "jaxlib", "sympy", "mpmath", "optree"}
_STDLIB = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_TORCH_NN = os.path.dirname(torch.nn.__file__) + os.sep
_LOAD_GLOBAL, _LOAD_NAME, _STORE_GLOBAL = (
    dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
)
_IMPORT_NAME, _MATCH_CLASS = dis.opmap["IMPORT_NAME"], dis.opmap["MATCH_CLASS"]
_HEAP_TYPE = 1 << 9  # the flag of a class that Python code has made
# Code that uses one of these names may read attributes by names that it computes.
_COMPUTED_NAMES = {
    *("getattr", "hasattr", "setattr", "vars", "__dict__", "attrgetter", "__getattribute__"),
    *("asdict", "astuple", "fields", "dir", "getmembers"),
}


@functools.cache
def is_library(module: str) -> bool:
    """Whether a module is torch's, functx's, NumPy's or the standard library's."""
    root = module.partition(".")[0]
    return root in LIBRARIES or (root in _STDLIB_NAMES and root != "__main__")


@functools.cache
def is_library_class(cls: type) -> bool:
    """Whether a class belongs to a library.

    ``__module__`` alone is not enough: a class that ``exec`` makes may claim any module.
    """
    module = type.__getattribute__(cls, "__module__")
    if not isinstance(module, str) or not is_library(module):
        return False
    found: Any = vars(sys.modules.get(module, types.ModuleType("")))
    name = type.__getattribute__(cls, "__qualname__")
    outer = found.get(name.partition(".")[0])
    return outer is not None or not cls.__flags__ & _HEAP_TYPE or module.startswith("functx.")


@functools.cache
def is_library_file(filename: str) -> bool:
    """Whether code in a file is torch's, functx's, NumPy's or the standard library's."""
    if is_internal(filename):
        return True
    package = next((p for p in _PACKAGES if p in filename), None)
    if package is None:
        return filename.startswith(_STDLIB)
    root = filename.rpartition(package)[2].partition(os.sep)[0]
    return root.removesuffix(".py") in LIBRARIES


def is_of_package(filename: str) -> bool:
    """Whether code belongs to an installed package rather than to the program."""
    return any(package in filename for package in _PACKAGES)


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names in a code object, and strings that may be names, as in ``getattr(x, "scale")``."""
    consts = [*code.co_consts]
    consts += (part for c in code.co_consts if type(c) is tuple for part in c)  # match, keywords
    texts = (c for c in consts if type(c) is str and len(c) < 60 and c.isidentifier())
    return frozenset([*code.co_names, *texts])


@functools.cache
def globals_in(code: types.CodeType, stored: bool = False) -> frozenset[str]:
    """The globals that a code object reads or sets, or only those that it sets."""
    if "globals" in code.co_names and not stored:  # globals()["name"]
        return names_in(code)
    opcodes = {_STORE_GLOBAL} if stored else {_STORE_GLOBAL, _LOAD_GLOBAL, _LOAD_NAME}
    if opcodes.isdisjoint(code.co_code[::2]):
        return frozenset()
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opcode in opcodes)


@functools.cache
def imports_in(code: types.CodeType) -> tuple[str, ...]:
    """The full names of modules that a code object imports, and of their parent packages."""
    if _IMPORT_NAME not in code.co_code[::2]:
        return ()
    names = [i.argval for i in dis.get_instructions(code) if i.opcode == _IMPORT_NAME]
    parts = [name.split(".") for name in names if name]
    return tuple(".".join(p[: n + 1]) for p in parts for n in range(len(p)))


@functools.cache
def with_inner(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """A code object, and those of the functions, classes and comprehensions that it defines."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (code, *(found for c in inner for found in with_inner(c)))


@functools.cache
def type_of_tensor_in(code: types.CodeType) -> int | None:
    """The line where a user's code compares ``type(x)`` with a class of tensors, if it does."""
    if "type" not in code.co_names or is_library_file(code.co_filename):
        return None
    if {"Tensor", "Parameter"}.isdisjoint(code.co_names):
        return None
    instructions = [*dis.get_instructions(code)]
    for i, instruction in enumerate(instructions):
        if instruction.opname not in ("IS_OP", "COMPARE_OP", "CONTAINS_OP"):
            continue
        near = {x.argval for x in instructions[max(i - 12, 0) : i] if type(x.argval) is str}
        if "type" in near and near & {"Tensor", "Parameter"}:
            lines = (x.starts_line for x in instructions[i::-1] if x.starts_line)
            return int(next(lines, code.co_firstlineno))
    return None


class Ran:
    """The code that has run in a trace and can read state of user code."""

    def __init__(self, codes: set[types.CodeType]) -> None:
        named = {c for c in codes if not is_library_file(c.co_filename)}
        # Modules of torch read their own attributes, which users set.
        of_modules = {c for c in codes if c.co_filename.startswith(_TORCH_NN)}
        self.codes = frozenset(named)
        by_users = frozenset[str]().union(*map(names_in, named))
        self.names = by_users.union(*map(names_in, of_modules))
        # A class pattern of ``match`` reads attributes by the names in ``__match_args__``.
        matches = any(_MATCH_CLASS in c.co_code[::2] for c in named)
        self.computes_names = matches or not by_users.isdisjoint(_COMPUTED_NAMES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ran) and (self.codes, self.names) == (other.codes, other.names)

    def __hash__(self) -> int:
        return hash((self.codes, self.names))

    def with_names(self, names: Iterable[str]) -> Ran:
        """A copy with the same code and further names."""
        other = copy.copy(self)
        other.names = self.names.union(names)
        return other

    def runs(self, code: types.CodeType) -> bool:
        """Whether a function, or one that it defines, has run."""
        return not self.codes.isdisjoint(with_inner(code))


@contextmanager
def noted(codes: set[types.CodeType]) -> Iterator[None]:
    """Add the code objects that run to ``codes``; see NOTE [what ran]."""
    if sys.version_info >= (3, 12):
        tool = next((i for i in (4, 3) if sys.monitoring.get_tool(i) is None), None)
        if tool is not None:
            with _monitored(tool, codes.add):
                yield
            return
    with _traced(codes.add):
        yield


@contextmanager
def _monitored(tool: int, add: Callable[[types.CodeType], None]) -> Iterator[None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]

    def started(code: types.CodeType, _: int) -> Any:
        add(code)
        return monitoring.DISABLE  # report this code object only once

    monitoring.use_tool_id(tool, "functx.jit")
    monitoring.register_callback(tool, monitoring.events.PY_START, started)
    monitoring.restart_events()
    monitoring.set_events(tool, monitoring.events.PY_START)
    try:
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(tool)


@contextmanager
def _traced(add: Callable[[types.CodeType], None]) -> Iterator[None]:
    before = sys.gettrace()

    def called(frame: types.FrameType, event: Any, arg: Any) -> Any:
        add(frame.f_code)
        return None if before is None else before(frame, event, arg)

    setattr(called, graphs.NOTES_CODE, before is None)
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)
