"""Names that a function writes to and never reads: the lists it appends to, the counters it raises.

A function that keeps count of its calls changes what it closes over by being traced, and would be
traced again at each call if that counted as another environment.  Nothing it computes depends on
such a name, as far as its source tells: every mention is the receiver of a call that adds to a
collection, or the target of an augmented assignment, as a statement of its own.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator

_ADDING = ("add", "append", "extend", "update")


@functools.lru_cache(1024)
def only_written(code: types.CodeType) -> frozenset[str]:
    """The names, closed over or global, that the code of a function only writes to."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return frozenset()
    if not isinstance(function, ast.FunctionDef):  # the source of a lambda is the line it is on
        return frozenset()
    harmless = [name for node in ast.walk(function) for name in _written(node)]
    ids = {id(name) for name in harmless}
    read = {
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and id(node) not in ids
    }
    return frozenset({name.id for name in harmless} - read)


def _written(node: ast.AST) -> Iterator[ast.Name]:
    """The name that a statement writes to without reading it for anything else."""
    if isinstance(node, ast.AugAssign):
        target = node.target
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            target = target.value  # type: ignore[assignment]
        if isinstance(target, ast.Name):
            yield target
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        method = node.value.func
        if (
            isinstance(method, ast.Attribute)
            and method.attr in _ADDING
            and isinstance(method.value, ast.Name)
        ):
            yield method.value
