"""The names that the code of a function uses."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_Names = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
# By the id of the code, which is kept with them: the hash of a code is that of all that is in it.
_known: dict[int, tuple[types.CodeType, _Names]] = {}
_MANY = 4096
_REBINDS = dis.opmap["STORE_GLOBAL"]
_IMPORTS = dis.opmap["IMPORT_NAME"]


def names_in(code: types.CodeType) -> _Names:
    """Names that code and what is nested in it reads (attributes too), globals it rebinds, imports.

    A module that is imported relative to the package of the code begins with a dot for each level.
    """
    found = _known.get(id(code))
    if found is None:
        names: dict[str, None] = dict.fromkeys(code.co_names)
        rebound: dict[str, None] = {}
        imports: dict[str, None] = {}
        operations = code.co_code[::2]
        if _REBINDS in operations or _IMPORTS in operations:  # or a cache there is the same number
            level = 0
            for i in dis.get_instructions(code):
                if i.opcode == _REBINDS:
                    rebound[i.argval] = None
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
        if len(_known) >= _MANY:
            _known.clear()
        found = _known[id(code)] = code, (tuple(names), tuple(rebound), tuple(imports))
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
