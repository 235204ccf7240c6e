"""Iterators that a region can reach: each run takes what comes next, so that replays differ."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from functx._errors import ReplayError
from functx._remat._advanced import NotPutBackError
from functx._remat._code_names import names_in
from functx._torch_modules import frame_above

_MOST = 3
_LARGE = 1024
_ELSE = (
    " What a run takes from that, the next run does not get. Make it inside of the region, or take "
    "from it outside, and pass what it gave."
)


def iterators_reached(entries: Any) -> str:
    """What to say of iterators where a replay departs; called while it is under way.

    Args:
        entries: the record of its forward, by which the region is known.
    """
    frame: types.FrameType | None = frame_above(1)
    body: Any = None
    while frame is not None and body is None:
        region = frame.f_locals.get("self")
        if getattr(region, "entries", None) is entries:
            body = getattr(region, "body", None)
        frame = frame.f_back
    if body is None or not hasattr(body, "function"):  # of a pullback
        return ""
    found = dict.fromkeys(_named(body.function, body.statics))
    if not found:
        return ""
    names = ", ".join([*found][:_MOST])
    return (
        f" It reaches an iterator, {names}: what a run takes from that, the next run does not get. "
        "Make the iterator inside of the region, or take from it outside, and pass what it gave."
    )


def interrupted(error: Exception, name: str, entries: Any) -> None:
    """A replay has raised an error: it says so.

    Raises:
        ReplayError: an iterator has ended, which would end whatever takes backward passes from one;
            or could not be put where it was.
    """
    if isinstance(error, StopIteration):
        raise ReplayError(
            f"remat: the replay of the region {name!r} departed from its forward: an iterator that "
            f"it takes from has ended.{iterators_reached(entries)}"
        ) from error
    if isinstance(error, NotPutBackError):
        remedy = iterators_reached(entries) or _ELSE if error.remedy is None else error.remedy
        raise ReplayError(f"{error}{remedy}") from error
    if not isinstance(error, ReplayError):
        error.add_note(
            f"functx: raised while the region {name!r} ran again for a derivative, which it did "
            "not in its forward. It may read something that has changed since (a flag, a counter, "
            "train() or eval())."
        )


def _named(f: Any, arguments: Iterable[Any]) -> Iterator[str]:
    """The iterators that a function reaches, by name: not in large containers."""
    stack: list[tuple[str, Any]] = [("", f), *(("an argument", a) for a in arguments)]
    seen: set[int] = set()
    while stack:
        name, part = stack.pop()
        if id(part) in seen or len(seen) > _LARGE:
            continue
        seen.add(id(part))
        if isinstance(part, Iterator):
            yield f"{name} ({type(part).__name__})"
        elif isinstance(part, types.FunctionType):
            code = part.__code__
            cells = zip(code.co_freevars, part.__closure__ or ())
            stack += ((repr(name), cell.cell_contents) for name, cell in cells if _bound(cell))
            n = code.co_argcount
            given = part.__defaults__ or ()
            stack += zip(map(repr, code.co_varnames[n - len(given) : n]), given)
            stack += _of(part.__kwdefaults__ or {}, "")
            scope = part.__globals__
            stack += ((repr(g), scope[g]) for g in names_in(code)[0] if g in scope)
        elif isinstance(part, types.MethodType):
            stack += ((name, part.__func__), ("self", part.__self__))
        elif isinstance(part, functools.partial):
            arguments = (part.func, *part.args, *part.keywords.values())
            stack += (("an argument", a) for a in arguments)
        elif isinstance(part, nn.Module):
            for child in part.modules():
                stack += _of(vars(child), f"{type(child).__name__}.")
        elif isinstance(part, dict) and len(part) < _LARGE:
            stack += ((name, x) for x in part.values())
        elif isinstance(part, (list, tuple)) and len(part) < _LARGE:
            stack += ((name, x) for x in part)
        elif hasattr(part, "__dict__") and not isinstance(part, (type, types.ModuleType)):
            stack += _of(vars(part), f"{type(part).__name__}.")


def _of(values: Any, of: str) -> list[tuple[str, Any]]:
    return [(repr(f"{of}{name}"), x) for name, x in values.items()]


def _bound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
