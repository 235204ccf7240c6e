"""The names that the code of a function uses."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from importlib.util import resolve_name
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_Names = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
# By the id of the code, which is kept with them: the hash of a code is that of all that is in it.
_known: dict[int, tuple[types.CodeType, _Names]] = {}
_MANY = 4096
_REBINDS = dis.opmap["STORE_GLOBAL"]
_IMPORTS = dis.opmap["IMPORT_NAME"]
_STORES = dis.opmap["STORE_ATTR"]

# What is called that no code names.
NOT_NAMED = frozenset(
    f"__{name}__"
    for name in (
        *("call", "getattr", "getattribute", "setattr", "get", "set", "len", "iter", "next"),
        *("getitem", "setitem", "delitem", "contains", "enter", "exit", "bool", "float", "int"),
        *("index", "array", "torch_function", "eq", "ne", "lt", "le", "gt", "ge", "hash", "neg"),
        *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "matmul", "rmatmul"),
        *("truediv", "rtruediv", "itruediv", "floordiv", "mod", "pow", "rpow", "abs", "invert"),
        *("and", "rand", "or", "ror", "xor", "lshift", "rlshift", "rshift", "rrshift", "str"),
    )
) | {"forward", "setup_context"}
# What may set attributes of any name.
SETTERS = frozenset({"setattr", "vars", "__dict__", "__setattr__"})
# Code that names one of these may read or set what it does not name.
BY_ANY_NAME = SETTERS | {"getattr", "hasattr", "__getattribute__", "attrgetter"}


def names_in(code: types.CodeType) -> _Names:
    """Names that code and what is nested in it uses: all, globals rebound, imports, attributes set.

    A module that is imported relative to the package of the code begins with a dot for each level.
    """
    found = _known.get(id(code))
    if found is None:
        names: dict[str, None] = dict.fromkeys(code.co_names)
        rebound: dict[str, None] = {}
        imports: dict[str, None] = {}
        stored: dict[str, None] = {}
        operations = code.co_code[::2]
        # Or a cache there is the same number.
        if not {_REBINDS, _IMPORTS, _STORES}.isdisjoint(operations):
            level = 0
            for i in dis.get_instructions(code):
                if i.opcode == _REBINDS:
                    rebound[i.argval] = None
                elif i.opcode == _STORES:
                    stored[i.argval] = None
                elif i.opcode == _IMPORTS:
                    imports["." * level + i.argval] = None
                elif type(i.argval) is int:  # the last number but the names is the level
                    level = i.argval
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                inner = names_in(part)
                names |= dict.fromkeys(inner[0])
                rebound |= dict.fromkeys(inner[1])
                imports |= dict.fromkeys(inner[2])
                stored |= dict.fromkeys(inner[3])
        if len(_known) >= _MANY:
            _known.clear()
        found = _known[id(code)] = (
            code,
            (tuple(names), tuple(rebound), tuple(imports), tuple(stored)),
        )
    return found[1]


def imported(names: Iterable[str], scope: dict[str, Any]) -> list[Any]:
    """The modules that code imports when it runs, as far as they are there."""
    package = scope.get("__package__") or ""
    found = []
    for name in names:
        if package or name[:1] != ".":
            try:
                found.append(sys.modules.get(resolve_name(name, package)))
            except (ImportError, AttributeError):  # beyond the package; it says no name
                continue
    return [module for module in found if module is not None]


_ADDS = frozenset({"append", "appendleft", "extend", "add"})
_added_to: dict[int, tuple[types.CodeType, frozenset[str]]] = {}


def only_added_to(code: types.CodeType) -> frozenset[str]:
    """What code closes over and calls ``append`` or the like of: it reads nothing of that."""
    found = _added_to.get(id(code))
    if found is None:
        names = {*code.co_freevars}
        steps = [*dis.get_instructions(code)]
        for i, after in zip(steps, [*steps[1:], steps[-1]]):
            adds = after.opname in ("LOAD_METHOD", "LOAD_ATTR") and after.argval in _ADDS
            if i.opname.endswith("DEREF") and not (i.opname == "LOAD_DEREF" and adds):
                names.discard(i.argval)
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                names -= {*part.co_freevars} - only_added_to(part)
        if len(_added_to) >= _MANY:
            _added_to.clear()
        found = _added_to[id(code)] = code, frozenset(names)
    return found[1]


class OfGlobals(Generic[T]):
    """Something about the globals that a function names: found out anew when they are others.

    Args:
        find: gives it for the names and their values; it holds none of these.
    """

    def __init__(self, find: Callable[[Sequence[str], Sequence[Any]], T]) -> None:
        self._find = find
        self._found: dict[int, tuple[Any, T]] = {}

    def __call__(self, f: types.FunctionType) -> tuple[Sequence[Any], T]:
        """The values, in the order of the names, and what was found out."""
        names, scope = names_in(f.__code__)[0], f.__globals__
        values = [*map(scope.get, names)]
        by = names, id(scope), [*map(id, values)], [*map(id, map(type, values))]
        key = id(f.__code__)
        found = self._found.get(key)
        if found is None or found[0] != by:
            if len(self._found) >= _MANY:
                self._found.clear()
            found = self._found[key] = by, self._find(names, values)
        return values, found[1]
