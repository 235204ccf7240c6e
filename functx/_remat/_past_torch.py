"""Memory that is not torch's own: of a NumPy array, a buffer, another library.

It has no version, and nothing that function modes are shown makes tensors of it: each run of a body
that calls ``torch.from_numpy`` has other ones, which only their contents tell from those of before.
What an operation reads is compared as a constant; `Held` is for what a hook closes over, and what a
custom Function keeps for its backward, which a replay's pullback reads as the replay has it.

NOTE [what is held by the same object]
An object that leads to such memory in both runs, the same one, is the program's. What a body binds
in it is put back before hooks run, and what the program does is what they find without remat, too.
So only what other objects and functions hold is compared, which a replay makes anew.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from functx import _torch
from functx._remat._code_names import names_in, only_added_to
from functx._remat._much_memory import bits_of_much
from functx._remat._slots import own_attributes

LITTLE = 1 << 20
"""So many bytes are compared of what operations read."""

_SAMPLE = 256
"""So many entries of what is larger, where a hook holds it."""

_MANY = 256
_LONG = 8192
_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes})
_INSIDE = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    functools.cached_property: ("func",),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.partial: ("func", "args", "keywords"),
}
_NOT_THE_USERS = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "functx"}
# Code that names one of these may read what it does not name.
_BY_ANY_NAME = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "asdict"}
)
# Methods that Python does not call where a hook reads an object.
_NOT_CALLED = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "post_init", "del", "init_subclass", "class_getitem", "set_name"),
        *("repr", "str", "format", "dir", "sizeof", "eq", "ne", "lt", "le", "gt", "ge", "hash"),
        *("getstate", "setstate", "reduce", "reduce_ex", "copy", "deepcopy", "replace"),
        *("getnewargs", "getnewargs_ex", "setattr", "delattr", "set", "delete", "subclasshook"),
    )
)

_Way = tuple["weakref.ref[Any]", ...]


def ways_of(array: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to read what is in a NumPy array, and to write it."""
    return array.copy, functools.partial(array.__setitem__, ...)


def is_foreign(t: Tensor) -> bool:
    """Whether memory is not torch's own."""
    if type(t) is not Tensor or t.grad_fn is not None:  # what was computed is torch's
        return False
    try:
        return not t.untyped_storage().resizable() and t.numel() > 0
    except (RuntimeError, NotImplementedError):  # no memory: sparse, fake, a wrapper
        return False


def may_be_unseen(t: Tensor) -> bool:
    """Whether a body may have made ``t`` by what modes are not shown: NumPy, or a parameter."""
    return isinstance(t, Parameter) or is_foreign(t)


def foreign_bits(t: Tensor, most: int = LITTLE) -> int | None:
    """A hash of memory that is not torch's own, or a checksum; ``None`` where it is torch's."""
    size = _size(t)
    if size is None:
        return None
    if size > most:
        return bits_of_much(t.data_ptr(), size)
    return hash(ctypes.string_at(t.data_ptr(), size))


def _size(t: Tensor) -> int | None:
    """How many bytes of memory that is not torch's a tensor reaches over."""
    if type(t) is not Tensor or t.grad_fn is not None:  # what was computed is torch's
        return None
    try:
        if t.untyped_storage().resizable() or not t.is_cpu or not t.numel():
            return None
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
        return (last + 1) * t.element_size()
    except (RuntimeError, NotImplementedError):  # no memory: sparse, fake, a wrapper
        return None


class Held:
    """A tensor or array over such memory: equal to itself, and to what holds the same.

    What is there in both runs is the program's own, which may change it between them.
    """

    __slots__ = ("_kind", "_of", "_sample", "_whole", "size")

    def __init__(self, x: Any, kind: str, sample: int, whole: int | None, size: int) -> None:
        self._of, self._kind = weakref.ref(x), kind
        self._sample, self._whole = sample, whole
        self.size = 0 if whole is None else size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held):
            return NotImplemented
        mine = self._of()
        if mine is not None and mine is other._of():
            return True
        if (self._kind, self._sample) != (other._kind, other._sample):
            return False
        return self._whole == other._whole or None in (self._whole, other._whole)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        bits = self._sample if self._whole is None else self._whole
        return f"{self._kind} of memory that is not torch's ({bits & 0xFFFFFFFF:08x})"


class AllHeld:
    """Those that a function holds. NOTE [what is held by the same object].

    Args:
        held: each with the objects on the way to it.
        objects: all that were come by.
    """

    __slots__ = ("_held", "_objects")

    def __init__(self, held: Sequence[tuple[Held, _Way]], objects: _Way) -> None:
        self._held, self._objects = held, objects

    def __bool__(self) -> bool:
        return bool(self._held or self._objects)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AllHeld):
            return NotImplemented
        both = {id(o) for ref in self._objects if (o := ref()) is not None}
        both &= {id(o) for ref in other._objects if (o := ref()) is not None}
        return self._but(both) == other._but(both)

    __hash__ = None  # type: ignore[assignment]

    def _but(self, objects: set[int]) -> list[Held]:
        return [one for one, way in self._held if not any(id(ref()) in objects for ref in way)]

    def __repr__(self) -> str:
        return repr([one for one, _ in self._held])


def held(x: Any, most: int = LITTLE) -> Held | None:
    """Such a tensor or array; ``None`` for anything else.

    Args:
        x: anything.
        most: so many bytes of it are compared, of what is larger a few that are spread over it.
    """
    if isinstance(x, Tensor):
        found = _bits_of(_inside(x), most)
    elif not hasattr(type(x), "__array_interface__") or not type(x).__weakrefoffset__:
        return None
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(x, numpy.ndarray):
        found = _bits_in(x.view(numpy.ndarray), most)
    else:
        about = x.__array_interface__
        size = math.prod(about["shape"]) * int(about["typestr"][2:])
        kind = f"an array {about['typestr']}{[*about['shape']]}"
        return Held(x, kind, 0, hash(x.tobytes()) if size <= most else None, size)
    what = "a tensor" if isinstance(x, Tensor) else "an array"
    return found and Held(x, f"{what} {str(x.dtype).removeprefix('torch.')}{[*x.shape]}", *found)


_Bits = tuple[int, "int | None", int]


def _bits_of(t: Tensor, most: int) -> _Bits | None:
    """Hashes of a sample of a tensor's memory and of all, and how much that is.

    ``None`` where it is torch's.
    """
    size = _size(t)
    if size is None:
        return None
    start, item = t.data_ptr(), t.element_size()
    places = range(0, size // item, max(size // item // _SAMPLE, 1))
    sample = hash(b"".join(ctypes.string_at(start + i * item, item) for i in places))
    return sample, hash(ctypes.string_at(start, size)) if size <= most else None, size


def _bits_in(a: Any, most: int) -> _Bits | None:
    """The same of an array; ``None`` where that holds objects."""
    if a.dtype.hasobject:
        return None
    a = a[tuple(slice(None) if stride else slice(1) for stride in a.strides)]  # of a broadcast
    size, whole = a.nbytes, hash(a.tobytes()) if a.nbytes <= most else None
    while a.size > _SAMPLE:
        largest = a.shape.index(max(a.shape))
        a = a[(*[slice(None)] * largest, slice(None, None, max(a.shape[largest] // _SAMPLE, 2)))]
    return hash(a.tobytes()), whole, size


def _inside(t: Tensor) -> Tensor:
    while _torch.is_wrapped(t):
        t = _torch.get_unwrapped(t)
    return t


def _address(t: Tensor) -> int | None:
    t = _inside(t)
    return t.data_ptr() if is_foreign(t) else None


def held_by(parts: Iterable[Any], given: Iterable[Tensor] = (), code: Any = None) -> AllHeld:
    """Those that functions and other objects lead to: by cells, defaults, and what they hold.

    Of an object, that is what code names of it: that of the functions, and what they call.

    Args:
        parts: where to begin.
        given: tensors that are compared as such, of whose memory none are told.
        code: of the function that reads them, if they are none.
    """
    addresses = {*map(_address, given)} - {None}
    walk = _Walk(parts)
    if code is not None:
        walk.read(code)
    found: list[tuple[Held, _Way]] = []
    left = LITTLE
    for x, way in walk:
        with suppress(Exception):  # what can't be looked at: a proxy whose object is gone
            if addresses and isinstance(x, Tensor) and _address(x) in addresses:
                continue
            one = held(x, left)
            if one is None:
                walk.go_on(x, way)
            else:
                found.append((one, way))
                left -= one.size
    return AllHeld(found, walk.objects)


class _Walk:
    """What code can read, beginning somewhere, each with the way to it."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._stack: list[tuple[Any, _Way]] = [(part, ()) for part in parts]
        self._seen = set[int]()
        self._held: list[Any] = []  # so that their ids stay theirs
        self._of: list[tuple[Any, _Way, set[str]]] = []
        self._names = set[str]()
        self._read = set[int]()
        self.objects: _Way = ()

    def __iter__(self) -> Iterator[tuple[Any, _Way]]:
        while len(self._seen) < _MANY and (self._stack or self._named()):
            x, way = self._stack.pop()
            if type(x) in _LEAVES or id(x) in self._seen:
                continue
            self._seen.add(id(x))
            self._held.append(x)
            yield x, way

    def read(self, f: Any) -> None:
        """Code reads what it names, and so does the user's code that it names."""
        stack = [f]
        while stack and len(self._read) < _MANY:
            f = stack.pop()
            stack += _inside_of(f)
            if type(f) is not types.FunctionType or id(f) in self._read:
                continue
            self._read.add(id(f))
            self._held.append(f)
            names = names_in(f.__code__)[0]
            self._names.update(names, _strings(f.__code__))
            stack += filter(callable, _contents(f))
            for name in names:
                x = f.__globals__.get(name)
                if type(x) is types.FunctionType and is_the_users(x.__module__):
                    stack.append(x)
                elif type(x) is types.ModuleType and is_the_users(x.__name__):
                    those = [x.__dict__[n] for n in names if n in x.__dict__]
                    stack += [y for y in those if type(y) is types.FunctionType]

    def go_on(self, x: Any, way: _Way) -> None:
        """With what is in there."""
        parts: Iterable[Any] = ()
        if isinstance(x, types.FunctionType):
            self.read(x)
            parts = (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *_contents(x))
        elif inside := _inside_of(x):
            parts = inside
        elif isinstance(x, dict):
            parts = islice(dict.values(x), _LONG)
        elif isinstance(x, (list, tuple, deque)):
            kind: Any = next(k for k in (list, tuple, deque) if isinstance(x, k))
            parts = islice(kind.__iter__(x), _LONG)
        elif hasattr(type(x), "__array_interface__") and hasattr(x, "tolist"):  # of objects
            parts = x.ravel()[:_LONG].tolist()
        elif not isinstance(x, (Tensor, type, types.ModuleType, torch.nn.Module)):
            with suppress(TypeError):
                way = (*way, weakref.ref(x))
                self.objects += way[-1:]
            self._of.append((x, way, set()))
            for cls in type(x).__mro__:
                if is_the_users(cls.__module__):
                    for name, method in cls.__dict__.items():
                        if name[:2] == "__" == name[-2:] and name not in _NOT_CALLED:
                            self.read(method)
        self._stack += [(part, way) for part in parts if type(part) not in _LEAVES]

    def _named(self) -> bool:
        """Go on with attributes of objects that code names, if there are any that are new."""
        everything = not self._names.isdisjoint(_BY_ANY_NAME)
        for x, way, done in self._of:
            with suppress(Exception):
                own = own_attributes(x)
                for cls in type(x).__mro__:
                    if is_the_users(cls.__module__):
                        own = {**{n: y for n, y in cls.__dict__.items() if n[:2] != "__"}, **own}
                names = [n for n in own if n not in done and (everything or n in self._names)]
                done.update(names)
                self._stack += [(own[name], way) for name in names]
        return bool(self._stack)


def _inside_of(f: Any) -> list[Any]:
    """What a method, a property or the like is made of."""
    kind = functools.partial if isinstance(f, functools.partial) else type(f)
    return [getattr(f, part) for part in _INSIDE.get(kind, ())]


def _contents(f: types.FunctionType) -> list[Any]:
    """What a function closes over and reads."""
    found: list[Any] = []
    if f.__closure__ is None:
        return found
    unread = only_added_to(f.__code__)
    for name, cell in zip(f.__code__.co_freevars, f.__closure__):
        with suppress(ValueError):  # not bound yet
            if name not in unread:
                found.append(cell.cell_contents)
    return found


def _strings(code: types.CodeType) -> Iterator[str]:
    """The strings in code, which may be names too: ``getattr`` takes them."""
    for x in code.co_consts:
        if type(x) is str:
            yield x
        elif type(x) is types.CodeType:
            yield from _strings(x)


def is_the_users(module: Any) -> bool:
    """Whether a module is no part of Python, torch, NumPy or functx, by its name."""
    return isinstance(module, str) and module.partition(".")[0] not in _NOT_THE_USERS
