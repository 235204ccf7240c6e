"""What hooks of one run reach: variables, lists, dicts, sets, arrays, objects; and who else does.

Others are found by the numbers of references, so nothing is searched for them.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from functx._remat._arguments import SCALARS
from functx._remat._contents_by_place import CONTAINERS, contents, is_memory, is_number
from functx._remat._past_torch import is_the_users

_DEPTH = 4
_LARGE = 1024  # entries of what is not looked at
_MANY = 256  # things that one hook reaches
_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, *_IN_C)
_LOOKED_AT = (Tensor, nn.Module, FunctionCtx, types.SimpleNamespace)
METHODS = (types.MethodType, *_IN_C)


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
    if isinstance(x, (type, types.ModuleType, *SCALARS)):
        return False
    if isinstance(x, types.FunctionType):
        return _is_of_the_user(x)
    return (
        isinstance(x, _LOOKED_AT)
        or is_memory(x)
        or (not isinstance(x, FUNCTIONS) and is_the_users(type(x).__module__))
    )


def _is_of_the_user(f: types.FunctionType) -> bool:
    """Whether code of the user's has made it: those of torch and functx have state of their own."""
    return is_the_users(f.__globals__.get("__name__"))


class Walk:
    """What hooks of one run reach.

    Args:
        hooks: of the run; ``None`` for one that is none of the user's.
        outer: ids of variables that the function of the region closes over: they are the program's,
            and so is what these hold.

    Attributes:
        others: ids of what others than these hooks hold, or hold what holds it.
        by_hook: `Fixed`, cells, containers and objects that each hook reaches, by the way there.
    """

    def __init__(self, hooks: Sequence[Any], outer: Collection[int] = ()) -> None:
        self._outer = outer
        self._references: Counter[int] = Counter()
        self._holds: dict[int, list[int]] = {}
        self._boxes: dict[int, list[Any]] = {}
        for hook in hooks:
            if hook is not None:
                self._references[id(hook)] += 2  # of the tape, and in the list
                self._from(hook, None)
        hook = None  # or it would be one more
        self.others = self._held_by_others()
        self._boxes = {}
        self.by_hook: list[dict[str, Any]] = [{} for _ in hooks]
        for hook, found in zip(hooks, self.by_hook):
            if hook is not None:
                self._from(hook, found)

    def _from(self, hook: Any, found: dict[str, Any] | None) -> None:
        """Count references; or with ``found``, note what a hook reaches, which is one more."""
        met: set[int] = set()
        ahead = deque([("", hook, _DEPTH, False)])
        self._boxes.setdefault(id(hook), [hook])
        while ahead and len(met) < _MANY:
            way, x, depth, theirs = ahead.popleft()
            if id(x) in met:
                continue
            met.add(id(x))
            looked_into = isinstance(x, types.CellType) or (not theirs and _is_looked_into(x))
            if found is not None and looked_into:
                found[way] = x
            if depth:
                parts = self._beyond(x, way, depth, theirs, found)
                if found is None and id(x) not in self._holds:
                    self._holds[id(x)] = [id(part[1]) for part in parts]
                    for part in parts:
                        self._references[id(part[1])] += 1
                        self._boxes.setdefault(id(part[1]), [part[1]])
                ahead += parts

    def _beyond(
        self, x: Any, way: str, depth: int, theirs: bool, found: dict[str, Any] | None
    ) -> list[tuple[str, Any, int, bool]]:
        parts: list[tuple[str, Any, int, bool]] = []
        users = not isinstance(x, types.FunctionType) or _is_of_the_user(x)
        if isinstance(x, functools.partial):
            parts.append((f"{way}.func", x.func, depth - 1, theirs))
        elif isinstance(x, METHODS):
            parts.append((f"{way}.self", x.__self__, depth, theirs))
            if isinstance(x, types.MethodType):
                parts.append((f"{way}.func", x.__func__, depth, theirs))
        for name, one in bound_by(x):
            if isinstance(one, types.CellType):
                if users:
                    parts.append((way + name, one, depth, theirs))
                else:
                    held = contents(one).values()
                    parts += [(f"{way}{name}:", content, depth - 1, True) for content in held]
            else:
                if found is not None and not theirs:
                    found[way + name] = one
                parts.append((f"{way}{name}:", one.value, depth - 1, theirs))
        if isinstance(x, types.CellType):
            theirs = theirs or id(x) in self._outer
            parts += [(f"{way}:", one, depth - 1, theirs) for one in contents(x).values()]
        elif type(x) is tuple:
            parts += [(f"{way}/{i}", one, depth - 1, theirs) for i, one in enumerate(x)]
        elif not theirs and _is_looked_into(x) and not isinstance(x, (Tensor, nn.Module)):
            own = contents(x).items()
            parts += [
                (f"{way}/{key!r}", one, depth - 1, False) for key, one in own if is_number(key)
            ]
        return [part for part in parts if not is_number(part[1])]

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


def _references(box: list[Any]) -> int:
    """How many references there are to what is in a list, but that of the list."""
    return sys.getrefcount(box[0]) - _OF_A_BOX


_OF_A_BOX = 0
_OF_A_BOX = _references([[]])
