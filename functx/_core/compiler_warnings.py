"""What functx tells users of ``torch.compile``: transforms run in eager there, with one warning.

The private API behind it is in `functx._torch.compiler`, which warns nobody.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from functx._core.source_location import is_internal, line_of, where
from functx._core.validate import name_of
from functx._torch import compiler

F = TypeVar("F", bound=Callable[..., Any])

_IN_EAGER = (
    "torch.compile runs transforms of functx, and regions in them, with a budget or by names, in "
    "eager; functx.jit(f) compiles the whole stack as one graph, and keeps its recompute"
)
_told: set[Any] = set()


def uncompiled(f: F) -> F:
    """Exclude ``f`` from ``torch.compile``: the graph breaks there, and ``f`` runs in eager."""
    return compiler.never_compiled(f, _IN_EAGER)


@compiler.constant_in_graph
def tell(name: str, what: str = _IN_EAGER) -> None:
    """Warn once for each line that something runs in eager, or lacks something, when traced.

    The compiler calls this while it traces. It is not part of what it compiles.
    """
    text = f"functx: {name}: {what}."
    frames = [f for f in compiler.traced_stack() if not is_internal(f.filename)]
    lines = [(f.filename, f.lineno or 0) for f in frames[-1:]]  # nothing is traced in eager
    if (text, *lines) not in _told:
        _told.add((text, *lines))
        file, line = (*lines, line_of(where())[:2])[0]
        warnings.warn_explicit(text, RuntimeWarning, file, line)


@compiler.constant_in_graph
def exporting() -> bool:
    """Whether ``torch.export`` or ``torch.jit.trace`` runs this; a warning says what that means."""
    found = compiler.exporting()
    if found:
        tell(
            "a region",
            "what torch.export and torch.jit.trace make of a model has none: nothing is computed "
            "again where it is differentiated. functx.graph.remat puts recompute into a graph",
        )
    return bool(found)


def told(f: F, like: Any = None) -> F:
    """Exclude ``f`` from torch.compile, and warn once when the compiler meets it.

    The result has the name and the docstring of ``like``, the user's function, if that is given.
    (It gets no other attributes: those of a module are its parameters.)
    """
    uncompiled(f)
    name = f"functx.{f.__name__}" if like is None else name_of(like)

    @functools.wraps(f if like is None else like, updated=())
    def telling(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            tell(name)
        return f(*args, **kwargs)

    return telling  # type: ignore[return-value]
