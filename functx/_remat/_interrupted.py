"""What is said where a replay departs or raises: of errors, and iterators and caches it reaches."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from functx._errors import RematError, ReplayError
from functx._remat._advanced import NotPutBackError
from functx._remat._code_names import names_in
from functx._remat._really_held import CACHED
from functx._torch_modules import frame_above

_MOST = 3
_LARGE = 1024
_ELSE = (
    " What a run takes from that, the next run does not get. Make it inside of the region, or take "
    "from it outside, and pass what it gave."
)


def iterators_and_caches(entries: Any) -> str:
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
    found = [*_named(body.function, body.statics)]
    iterators = dict.fromkeys(n for n, x in found if type(x) is not CACHED)
    caches = dict.fromkeys(n for n, x in found if type(x) is CACHED and x.cache_info().currsize)
    said = ""
    if iterators:
        names = ", ".join([*iterators][:_MOST])
        said += (
            f" It reaches an iterator, {names}: what a run takes from that, the next run does not "
            "get. Make the iterator inside of the region, or take from it outside, and pass what "
            "it gave."
        )
    if caches:
        names = ", ".join([*caches][:_MOST])
        said += (
            f" It calls a function with a cache, {names}: what one run computes there, the next "
            "one finds. Call it once before the region, with the same arguments."
        )
    return said


def interrupted(error: Exception, name: str, entries: Any) -> None:
    """A replay has raised an error: it says so.

    Raises:
        ReplayError: an iterator has ended, which would end whatever takes backward passes from one;
            or could not be put where it was.
    """
    if isinstance(error, StopIteration):
        raise ReplayError(
            f"remat: the replay of the region {name!r} departed from its forward: an iterator that "
            f"it takes from has ended.{iterators_and_caches(entries)}"
        ) from error
    if isinstance(error, NotPutBackError):
        remedy = iterators_and_caches(entries) or _ELSE if error.remedy is None else error.remedy
        raise ReplayError(f"{error}{remedy}") from error
    if not isinstance(error, ReplayError):
        error.add_note(
            f"functx: raised while the region {name!r} ran again for a derivative, which it did "
            "not in its forward. It may read something that has changed since (a flag, a counter, "
            "train() or eval())."
        )


def interrupted_backwards(error: Exception, name: str) -> None:
    """Code on the tape of a replay has raised an error: it says so, if nobody else has."""
    if not isinstance(error, RematError) and not getattr(error, "__notes__", ()):
        error.add_note(
            f"functx: raised in a backward pass of the region {name!r}, on the tape of its second "
            "run. What the first one has stored under keys of its own (ids, random names) is not "
            "what that one asks for."
        )


def _named(f: Any, arguments: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The iterators and caches that a function reaches, with names: not in large containers."""
    stack: list[tuple[str, Any]] = [("", f), *(("an argument", a) for a in arguments)]
    seen: set[int] = set()
    while stack:
        name, part = stack.pop()
        if id(part) in seen or len(seen) > _LARGE:
            continue
        seen.add(id(part))
        if isinstance(part, Iterator):
            yield f"{name} ({type(part).__name__})", part
        elif type(part) is CACHED:
            yield f"{getattr(part, '__qualname__', name)!r} (functools.lru_cache)", part
            stack.append((name, part.__wrapped__))
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
            stack += _cached(part.__self__)
        elif isinstance(part, functools.partial):
            arguments = (part.func, *part.args, *part.keywords.values())
            stack += (("an argument", a) for a in arguments)
        elif isinstance(part, nn.Module):
            for child in part.modules():
                stack += [*_of(vars(child), f"{type(child).__name__}."), *_cached(child)]
        elif isinstance(part, dict) and len(part) < _LARGE:
            stack += ((name, x) for x in part.values())
        elif isinstance(part, (list, tuple)) and len(part) < _LARGE:
            stack += ((name, x) for x in part)
        elif hasattr(part, "__dict__") and not isinstance(part, (type, types.ModuleType)):
            stack += [*_of(vars(part), f"{type(part).__name__}."), *_cached(part)]


def _cached(one: Any) -> list[tuple[str, Any]]:
    """The methods of an object that have a cache."""
    classes = one.__mro__ if isinstance(one, type) else type(one).__mro__
    return [(name, x) for c in classes for name, x in vars(c).items() if type(x) is CACHED]


def _of(values: Any, of: str) -> list[tuple[str, Any]]:
    return [(repr(f"{of}{name}"), x) for name, x in values.items()]


def _bound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
