"""Under ``torch.compile``, run transforms in eager and warn once.

`functx._torch.compiler` has the private API that this needs. It does not warn.
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
    "torch.compile runs this in eager, like every functx transform, and every region that is in a "
    "transform, has a budget or saves by name. functx.jit(f) compiles the whole stack as one "
    "graph, with its recompute"
)
_told: set[Any] = set()


def uncompiled(f: F) -> F:
    """Exclude ``f`` from ``torch.compile``: the graph breaks there, and ``f`` runs in eager."""
    return compiler.never_compiled(f, _IN_EAGER)


@compiler.constant_in_graph
def tell(name: str, what: str = _IN_EAGER) -> None:
    """Warn once per line of user code that ``name`` does not compile as it is written.

    The compiler calls this function while it traces, and leaves the call out of the graph.

    Args:
        name: the function that the warning is about.
        what: the end of the warning, without a period.
    """
    text = f"functx: {name}: {what}."
    frames = [f for f in compiler.traced_stack() if not is_internal(f.filename)]
    lines = [(f.filename, f.lineno or 0) for f in frames[-1:]]  # empty in eager
    if (text, *lines) not in _told:
        _told.add((text, *lines))
        file, line = (*lines, line_of(where())[:2])[0]
        warnings.warn_explicit(text, RuntimeWarning, file, line)


@compiler.constant_in_graph
def exporting() -> bool:
    """Whether ``torch.export`` or ``torch.jit.trace`` runs this code; if so, warn.

    Neither keeps regions.
    """
    found = compiler.exporting()
    if found:
        tell(
            "a region",
            "torch.export and torch.jit.trace drop regions, so nothing is recomputed when the "
            "exported model is differentiated. functx.graph.remat puts recompute into a graph",
        )
    return bool(found)


def told(f: F, like: Any = None) -> F:
    """Exclude ``f`` from torch.compile, and warn once when the compiler meets it.

    The result has the name and the docstring of the user's function ``like``, if that is given.
    Other attributes are not copied: those of a module would be its parameters.
    """
    uncompiled(f)
    name = f"functx.{f.__name__}" if like is None else name_of(like)

    @functools.wraps(f if like is None else like, updated=())
    def telling(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            tell(name)
        return f(*args, **kwargs)

    return telling  # type: ignore[return-value]
