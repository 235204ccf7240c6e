"""Variables that hooks of a replay close over hold what those of the forward's hooks hold.

NOTE [what hooks are bound to]
The tape of a forward holds the hooks that were hung there, and these read and write the variables
that they close over when they are called: a counter, a factor, what is to hold a gradient. The
hooks of a replay are made anew, and close over variables of the replay. They are left as they are,
since others of the replay may close over these too; but when its body has returned they are given
what is in those of the forward, which the region holds as a tape would, and what a hook has left
there is put back. This is so of numbers and the like, of what holds nothing yet, and of what a hook
has put there since; anything else is the replay's. Defaults, and arguments of a partial, are set.

A replay that a derivative may be taken of is run again for that, as it was run first: with what the
variables held then, and what is there afterwards is not put back.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from functx._remat._arguments import SCALARS, same
from functx._remat._past_torch import is_the_users
from functx._remat._slots import own_attributes

A_PAGE = 4096
"""Numbers from here on may be addresses."""

_DEPTH = 4
_NOTHING = object()  # is bound yet
_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, *_IN_C)

State = Mapping[str, Any]
"""What variables hold, by name."""


class Bound:
    """What a hook is bound to.

    Args:
        hook: of a forward, whose body has returned, or of a replay.
        outer: ids of the variables that the function of the region closes over.
    """

    def __init__(self, hook: Any, outer: Collection[int] = ()) -> None:
        self._name = _name_of(hook)
        self._kind = _kind_of(hook)
        self._cells: dict[str, types.CellType] = {}
        self._fixed: dict[str, Any] = {}
        for way, x in _reached(hook, "", _DEPTH):
            if isinstance(x, types.CellType):
                if _is_number(_content(x)):
                    self._cells[way] = x
            elif _is_number(x.value):
                self._fixed[way] = x.value
        self._outer = {way for way, cell in self._cells.items() if id(cell) in outer}
        self._kept = kept(hook)

    def __str__(self) -> str:
        return self._name

    def is_like(self, other: Bound) -> bool:
        """Whether that is the same function, or an object that is the same."""
        return bool(self._kind == other._kind and self._kept == other._kept)

    def state(self) -> State:
        """What the variables hold now."""
        return {way: _content(cell) for way, cell in self._cells.items()}

    def give(self, hook: Any, state: State, *, again: bool, recorded: bool) -> Callable[[], None]:
        """Give the variables of ``hook``, of a replay, what is in a state; what puts it back.

        Args:
            hook: that the replay has hung.
            state: what they are to hold.
            again: whether a replay for a derivative runs again: nothing is put back.
            recorded: whether it is one: tensors are its own but where the program finds them.
        """
        pairs = []
        for way, x in _reached(hook, "", _DEPTH):
            if isinstance(x, types.CellType):
                mine = self._cells.get(way)
                if mine is not None and mine is not x:
                    pairs.append((way, mine, x))
                    _set(x, state[way])
            elif way in self._fixed and x.value is not self._fixed[way]:
                x.set(self._fixed[way])

        def put_back() -> None:
            for way, mine, x in pairs:
                content = _content(x)
                if _is_number(content) or not recorded or way in self._outer:
                    _set(mine, content)

        return _nothing if again else put_back


def _nothing() -> None:
    """Nothing is put back."""


class _Fixed:
    """What is bound when a function is made."""

    def __init__(self, value: Any, set_: Callable[[Any], None]) -> None:
        self.value, self.set = value, set_


def _reached(f: Any, way: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The cells and `_Fixed` of a function, and of functions that it leads to, by name."""
    found: dict[str, Any] = {}
    if isinstance(f, functools.partial):
        yield from _reached(f.func, f"{way}.func", depth - 1)
        for i, x in enumerate(f.args):
            found[f"{way}[{i}]"] = _Fixed(x, functools.partial(_set_argument, f, i))
        for name, x in f.keywords.items():
            found[f"{way}[{name}]"] = _Fixed(x, functools.partial(f.keywords.__setitem__, name))
    elif isinstance(f, types.MethodType):
        yield from _reached(f.__func__, f"{way}.func", depth)
    elif isinstance(f, types.FunctionType):
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
            found[f"{way}.{name}"] = cell
        for i, x in enumerate(f.__defaults__ or ()):
            found[f"{way}[{i}]"] = _Fixed(x, functools.partial(_set_default, f, i))
        named = f.__kwdefaults__ or {}
        for name, x in named.items():
            found[f"{way}[{name}]"] = _Fixed(x, functools.partial(named.__setitem__, name))
    for there, x in found.items():
        yield there, x
        if depth > 1:
            inside = _content(x) if isinstance(x, types.CellType) else x.value
            yield from _reached(inside, f"{there}:", depth - 1)


def _set_default(f: Any, i: int, x: Any) -> None:
    f.__defaults__ = (*f.__defaults__[:i], x, *f.__defaults__[i + 1 :])


def _set_argument(f: Any, i: int, x: Any) -> None:
    f.__setstate__((f.func, (*f.args[:i], x, *f.args[i + 1 :]), f.keywords, f.__dict__ or None))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING


def _set(cell: types.CellType, content: Any) -> None:
    if content is not _NOTHING:
        cell.cell_contents = content
    else:
        with suppress(ValueError):
            del cell.cell_contents


def _is_number(x: Any) -> bool:
    """Or the like, or a tuple of such, or nothing."""
    if type(x) is tuple:
        return all(map(_is_number, x))
    return x is _NOTHING or isinstance(x, SCALARS)


def _name_of(f: Any) -> str:
    name = getattr(f if isinstance(f, _FUNCTIONS) else type(f), "__qualname__", None)
    return name if isinstance(name, str) else "a partial"


def _kind_of(f: Any) -> Any:
    """What is the same of functions that were made of the same code."""
    if isinstance(f, functools.partial):
        return _kind_of(f.func)
    if not isinstance(f, _FUNCTIONS):
        return type(f).__module__, type(f).__qualname__
    return getattr(inspect.unwrap(f), "__code__", _name_of(f))


class Kept:
    """Numbers of a function or an object: equal to those of the same one, whatever they are now.

    Args:
        x: the function or object.
        numbers: what it is bound to, or its attributes.
    """

    __slots__ = ("_numbers", "_of")

    def __init__(self, x: Any, numbers: list[Any]) -> None:
        self._of = weakref.ref(x)
        self._numbers = numbers

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Kept):
            return NotImplemented
        mine = self._of()
        return (mine is not None and mine is other._of()) or same(self._numbers, other._numbers)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(self._numbers)

    def __repr__(self) -> str:
        return "numbers"  # of which thing does not tell that


def kept(x: Any) -> Kept | tuple[Any, ...] | None:
    """What is compared of ``x`` that is made anew by each run; ``None`` for nothing.

    Numbers that are attributes of an object, or in a tuple. Lists and dicts may be changed by what
    runs since, and nothing tells one from another.
    """
    if isinstance(x, tuple):
        return tuple(one for one in x if _is_compared(one)) or None
    if isinstance(x, (types.MethodType, *_IN_C)):
        return kept(x.__self__)
    cls = type(x)
    if isinstance(x, (Tensor, type, *_FUNCTIONS)) or not is_the_users(cls.__module__):
        return None
    own = own_attributes(x).items()
    found = [n for name, one in own if _is_compared(one) for n in (name, one)]
    return Kept(x, found) if found and cls.__weakrefoffset__ else None


def _is_compared(x: Any) -> bool:
    """Whether that is a number or the like, and surely not the name of a thing of this run."""
    return isinstance(x, SCALARS) and not (type(x) is int and x >= A_PAGE)


def kept_by_a_function(f: Any) -> Kept | None:
    """The same of what a function is bound to."""
    found = []
    for way, x in _reached(f, "", 1):
        content = _content(x) if isinstance(x, types.CellType) else x.value
        if _is_compared(content):
            found += [way, content]
    return Kept(f, found) if found and type(f).__weakrefoffset__ else None
