"""What hooks of one run reach: variables, lists, dicts, sets, arrays, objects; and who else does.

Others are found by the numbers of references, so nothing is searched for them. What a library has
made around functions of the user's (a decorator, what calls a module's hooks) has state of its own,
which is left to it; one looks through it.
"""

from __future__ import annotations

import enum
import functools
import gc
import sys
import types
from collections import ChainMap, Counter, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from functx import _torch_modules
from functx._remat._arguments import SCALARS
from functx._remat._contents_by_place import (
    CONTAINERS,
    PLAIN,
    contents,
    has_random_state,
    is_iterator,
    is_memory,
    is_number,
)
from functx._remat._past_torch import is_the_users

_DEPTH = 4
_LARGE = 1024  # entries of what is not looked at
_MANY = 64  # things that one hook reaches
_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, *_IN_C)
_LOOKED_AT = (
    *(Tensor, nn.Module, FunctionCtx, types.SimpleNamespace),
    *(UserDict, UserList, ChainMap),
)
_NO_FURTHER = (Tensor, nn.Module, types.CellType, type)
METHODS = (types.MethodType, *_IN_C)


class _Whose(enum.Enum):
    """Who has made something, or holds it."""

    HOOKS = enum.auto()
    PROGRAMS = enum.auto()
    LIBRARYS = enum.auto()


class Fixed:
    """What is bound when a function is made."""

    def __init__(self, value: Any, set_: Callable[[Any], None]) -> None:
        self.value, self.set = value, set_


def bound_by(f: Any) -> Iterator[tuple[str, Any]]:
    """Cells and `Fixed` of a function, by name."""
    if isinstance(f, functools.partial):
        for i, x in enumerate(f.args):
            yield f"[{i}]", Fixed(x, functools.partial(_set_argument, f, i))
        for name, x in f.keywords.items():
            yield f"[{name}]", Fixed(x, functools.partial(f.keywords.__setitem__, name))
    elif isinstance(f, types.FunctionType):
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
            yield f".{name}", cell
        for i, x in enumerate(f.__defaults__ or ()):
            yield f"[{i}]", Fixed(x, functools.partial(_set_default, f, i))
        named = f.__kwdefaults__ or {}
        for name, x in named.items():
            yield f"[{name}]", Fixed(x, functools.partial(named.__setitem__, name))


def hooks_called_by(f: Any) -> list[Any]:
    """Hooks of a module that one on a tape calls."""
    held = [
        x for _, one in bound_by(f) if not isinstance(one, Fixed) for x in contents(one).values()
    ]
    return [hook for x in held for hook in _torch_modules.called_by(x)]


def _set_default(f: Any, i: int, x: Any) -> None:
    f.__defaults__ = (*f.__defaults__[:i], x, *f.__defaults__[i + 1 :])


def _set_argument(f: Any, i: int, x: Any) -> None:
    f.__setstate__((f.func, (*f.args[:i], x, *f.args[i + 1 :]), f.keywords, f.__dict__ or None))


def _is_looked_into(x: Any) -> bool:
    if isinstance(x, types.CellType):
        return True
    base: Any
    for base in CONTAINERS:
        if isinstance(x, base):
            return int(base.__len__(x)) <= _LARGE
    if isinstance(x, type):
        return is_the_users(x.__module__)
    if isinstance(x, (types.ModuleType, *SCALARS)):
        return False
    if isinstance(x, types.FunctionType):
        return _is_of_the_user(x)
    return (
        isinstance(x, _LOOKED_AT)
        or has_random_state(x)
        or is_iterator(x)
        or is_memory(x)
        or (not isinstance(x, FUNCTIONS) and is_the_users(type(x).__module__))
    )


def _is_of_the_user(f: types.FunctionType) -> bool:
    """Whether code of the user's has made it: those of torch and functx have state of their own."""
    return is_the_users(f.__globals__.get("__name__"))


def _is_around_the_users(x: Any) -> bool:
    """Whether a library has made that, maybe around a function of the user's."""
    if isinstance(x, types.FunctionType):
        return not _is_of_the_user(x)
    if isinstance(x, (type, nn.Module, types.ModuleType, *FUNCTIONS)):
        return False
    return _torch_modules.calls_hooks_of_modules(x) or (
        callable(x) and not is_the_users(type(x).__module__)
    )


def _held_by_a_library(x: Any) -> Sequence[Any]:
    """What is held by something of a library's, as often as that holds it."""
    if isinstance(x, types.FunctionType):
        return [*(x.__closure__ or ()), *x.__dict__.values()]
    if isinstance(x, tuple):
        return x
    if isinstance(x, (types.CellType, *CONTAINERS)):
        return [*contents(x).values()]
    if _is_around_the_users(x):
        return [y for y in gc.get_referents(x) if not isinstance(y, (type, types.ModuleType))]
    return ()


Part = tuple[str, Any, int, _Whose]
"""The way to something, that, how much further one looks, and whose that is."""


class Walk:
    """What hooks of one run reach.

    Args:
        hooks: of the run; ``None`` for one that is none of the user's.
        outer: ids of variables that the function of the region closes over: they are the program's,
            and so is what these hold.
        ways: to such variables, by hook; a replay has them by other ids.
        known: ids of what is known to be the program's: it is not looked into.

    Attributes:
        others: ids of what others than these hooks hold, or hold what holds it.
        by_hook: `Fixed`, cells, containers and objects that each hook reaches, by the way there.
    """

    def __init__(
        self,
        hooks: Sequence[Any],
        outer: Collection[int] = (),
        ways: Iterable[Collection[str]] = (),
        known: Collection[int] = (),
    ) -> None:
        self._outer, self._known = outer, known
        self._references: Counter[int] = Counter()
        self._holds: dict[int, list[int]] = {}
        self._boxes: dict[int, list[Any]] = {}
        for hook in hooks:
            self._references[id(hook)] += 2  # of the tape, and in the list
        found = [
            {} if hook is None else self._from(hook, theirs)
            for hook, theirs in zip_longest(hooks, ways, fillvalue=())
        ]
        hook = None  # or it would be one more
        self.others = self._held_by_others()
        boxes, self._boxes = self._boxes, {}
        self.by_hook: list[dict[str, Any]] = [
            {way: _at(boxes[key][0], place) for way, (key, place) in those.items()}
            for those in found
        ]

    def _from(self, hook: Any, ways: Collection[str]) -> dict[str, tuple[int, str | None]]:
        """What a hook reaches: by the way there, the id of that, or of what has it in a place."""
        found: dict[str, tuple[int, str | None]] = {}
        met: set[int] = set()
        ahead: deque[Part] = deque([("", hook, _DEPTH, _Whose.HOOKS)])
        self._boxes.setdefault(id(hook), [hook])
        while ahead and len(met) < _MANY:
            way, x, depth, whose = ahead.popleft()
            key = id(x)
            if key in met:
                continue
            met.add(key)
            if whose is not _Whose.PROGRAMS:
                whose = self._whose(x, whose, way, ways)
            if isinstance(x, types.CellType):
                if whose is not _Whose.LIBRARYS:
                    found[way] = key, None
            elif whose is _Whose.HOOKS and _is_looked_into(x):
                found[way] = key, None
            if not depth or key in self._known:
                continue
            parts = [*islice(self._beyond(x, way, depth, whose, found), _MANY)]
            if key not in self._holds:
                self._holds[key] = [id(part[1]) for part in parts]
                for part in parts:
                    self._references[id(part[1])] += 1
                    self._boxes.setdefault(id(part[1]), [part[1]])
            ahead += parts
        return found

    def _whose(self, x: Any, whose: _Whose, way: str, ways: Collection[str]) -> _Whose:
        """Whose something is, that the hooks or a library hold."""
        if isinstance(x, types.CellType):
            is_outer = id(x) in self._outer or way in ways
            return _Whose.PROGRAMS if is_outer else whose
        if _is_around_the_users(x):
            return _Whose.LIBRARYS
        if isinstance(x, FUNCTIONS) or is_the_users(type(x).__module__):
            return _Whose.HOOKS
        return whose

    def _beyond(
        self, x: Any, way: str, depth: int, whose: _Whose, found: dict[str, Any]
    ) -> Iterator[Part]:
        if whose is _Whose.LIBRARYS:
            further = depth - isinstance(x, CONTAINERS)
            for i, one in enumerate(_held_by_a_library(x)):
                if not is_number(one):
                    yield f"{way}>{i}", one, further, whose
            return
        if isinstance(x, types.CellType):
            for one in contents(x).values():
                if not is_number(one):
                    yield f"{way}:", one, depth - 1, whose
        elif isinstance(x, tuple):
            for i, one in enumerate(x):
                if not is_number(one):
                    yield f"{way}/{i}", one, depth - 1, whose
        elif isinstance(x, FUNCTIONS):
            yield from self._bound_by(x, way, depth, whose, found)
        if whose is _Whose.HOOKS and _is_looked_into(x) and not isinstance(x, _NO_FURTHER):
            own = contents(x)
            if not PLAIN.issuperset(map(type, own.values())):
                for key, one in own.items():
                    if is_number(key) and not is_number(one):
                        yield f"{way}/{key!r}", one, depth - 1, whose

    def _bound_by(
        self, f: Any, way: str, depth: int, whose: _Whose, found: dict[str, Any]
    ) -> Iterator[Part]:
        if isinstance(f, functools.partial):
            yield f"{way}.func", f.func, depth - 1, whose
        elif isinstance(f, METHODS):
            yield f"{way}.self", f.__self__, depth, whose
            if isinstance(f, types.MethodType):
                yield f"{way}.func", f.__func__, depth, whose
        for name, one in bound_by(f):
            if isinstance(one, types.CellType):
                yield way + name, one, depth, whose
                continue
            if whose is _Whose.HOOKS:
                found[way + name] = id(f), name
            if not is_number(one.value):
                yield f"{way}{name}:", one.value, depth - 1, whose

    def _held_by_others(self) -> Collection[int]:
        counts = {key: _references(box) for key, box in self._boxes.items()}
        ahead = [
            key
            for key, count in counts.items()
            # A tape holds contexts.
            if count > self._references[key] and not isinstance(self._boxes[key][0], FunctionCtx)
        ]
        found: set[int] = set()
        while ahead:
            key = ahead.pop()
            if key not in found:
                found.add(key)
                ahead += self._holds.get(key, ())
        return found


def _at(x: Any, place: str | None) -> Any:
    return x if place is None else dict(bound_by(x))[place]


def _references(box: list[Any]) -> int:
    """How many references there are to what is in a list, but that of the list."""
    return sys.getrefcount(box[0]) - _OF_A_BOX


_OF_A_BOX = 0
_OF_A_BOX = _references([[]])
