"""What variables, lists, dicts, sets, arrays, generators and objects hold, by the place there.

It is taken from them, compared, and put there.
"""

from __future__ import annotations

import array
import enum
import itertools
import pickle
import re
import sys
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from functx import _torch
from functx._remat._arguments import SCALARS, same
from functx._remat._past_torch import is_the_users
from functx._remat._python_random import is_generator, ways_of_generator
from functx._remat._really_held import QUEUES
from functx._remat._slots import own_attributes

A_PAGE = 4096
"""Numbers from here on may be addresses."""

_LARGE = 1 << 16  # bytes
_NUMBERS = (*SCALARS, bytes)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}|\d{6,}")
_OF_TORCH = "_pt_"  # attributes of contexts that are batched
CONTAINERS = (OrderedDict, dict, list, deque, set)

PLAIN = frozenset({int, float, bool, complex, str, bytes, type(None)})
"""Types of most numbers and the like."""

_AN_ITERATOR = object()  # has no place

Contents = Mapping[Any, Any]
"""What something holds, by the place there."""


def is_number(x: Any) -> bool:
    """Or the like, or a tuple of such."""
    if type(x) is tuple:
        return all(map(is_number, x))
    return type(x) in PLAIN or isinstance(x, _NUMBERS)


def is_compared(x: Any) -> bool:
    """Whether that is a number or the like, and surely not the name of a thing of this run."""
    if type(x) is str:
        return _ADDRESS.search(x) is None
    return isinstance(x, SCALARS) and not (type(x) is int and x >= A_PAGE)


def alike(a: Contents, b: Contents) -> bool:
    """Whether that is the same, in the same order."""
    return (
        len(a) == len(b) and all(map(_is_same, a, b)) and all(map(_is_same, a.values(), b.values()))
    )


def _is_same(x: Any, y: Any) -> bool:
    return x is y or (is_number(x) and type(x) is type(y) and same([x], [y]))


def is_place(key: Any) -> bool:
    """Whether that is the same place in all runs: no thing of one run, nor the name of one."""
    if type(key) is tuple:
        return all(map(is_place, key))
    return is_compared(key) or isinstance(key, enum.Enum)


def is_memory(c: Any) -> bool:
    """Whether that is an array or a buffer that can be written to, and not too large to be kept."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(c, numpy.ndarray):
        return c.flags.writeable and not c.dtype.hasobject and c.nbytes <= _LARGE
    return isinstance(c, (bytearray, array.array)) and memoryview(c).nbytes <= _LARGE


def is_iterator(c: Any) -> bool:
    """Whether that is one of Python's, which tells at most where it is."""
    return isinstance(c, Iterator) and not is_the_users(type(c).__module__)


def is_taken_from(c: Any) -> bool:
    """Whether runs take from that what comes next."""
    return isinstance(c, (*QUEUES, Iterator))


def has_random_state(c: Any) -> bool:
    """Whether that draws random numbers, and tells where it is."""
    return isinstance(c, torch.Generator) or is_generator(c)


def _state_of(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        with _torch.without_modes():
            return bytes(generator.get_state().numpy())
    read, _ = ways_of_generator(generator)
    return pickle.dumps(read())


def _set_state(generator: Any, state: bytes) -> None:
    if isinstance(generator, torch.Generator):
        with _torch.without_modes():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        _, write = ways_of_generator(generator)
        write(pickle.loads(state))


def _position(iterator: Any, depth: int = 3) -> tuple[Any, ...]:
    """Where an iterator is, as far as it tells: no place, so nothing is put there."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return () if frame is None else (frame.f_lasti,)
    if isinstance(iterator, itertools.count):
        return (repr(iterator),)
    with warnings.catch_warnings(), suppress(Exception):  # of classes that can't be copied
        warnings.simplefilter("ignore", DeprecationWarning)
        _, args, *rest = iterator.__reduce__()
        parts = [x for x in (*args, *rest) if depth and is_iterator(x)]
        numbers = [x for x in (*args, *rest) if is_number(x)]
        return (*numbers, *(_position(part, depth - 1) for part in parts))
    return ()


def contents(c: Any) -> dict[Any, Any]:
    """What a variable, a container, an array, or an object holds, whatever methods it has."""
    if isinstance(c, types.CellType):
        with suppress(ValueError):
            return {"": c.cell_contents}
        return {}
    if isinstance(c, dict):
        base: Any = OrderedDict if isinstance(c, OrderedDict) else dict
        return dict(base.items(c))
    for base in (list, deque):
        if isinstance(c, base):
            return dict(enumerate(base.__iter__(c)))
    if isinstance(c, set):
        return {x: x for x in set.__iter__(c)}
    if is_iterator(c):
        return {_AN_ITERATOR: _position(c)}
    if isinstance(c, type):
        return {name: x for name, x in vars(c).items() if not name.startswith("__")}
    if has_random_state(c):
        return {"": _state_of(c)}
    if is_memory(c):
        if isinstance(c, (bytearray, array.array)):
            return {"": bytes(c)}
        return {(c.dtype.str, c.shape): c.tobytes()}
    own = own_attributes(c)
    if isinstance(c, FunctionCtx):
        return {name: x for name, x in own.items() if not name.startswith(_OF_TORCH)}
    return own


def fill(c: Any, new: Contents) -> None:
    """Let something hold that, and nothing else."""
    if isinstance(c, types.CellType):
        if new:
            c.cell_contents = new[""]
        else:
            with suppress(ValueError):
                del c.cell_contents
    elif isinstance(c, CONTAINERS):
        base: Any = next(base for base in CONTAINERS if isinstance(c, base))
        base.clear(c)
        put = base.update if issubclass(base, (dict, set)) else base.extend
        put(c, new if isinstance(c, dict) else new.values())
    elif has_random_state(c):
        _set_state(c, new[""])
    elif isinstance(c, type):
        for name in contents(c).keys() - new.keys():
            delattr(c, name)
        for name, x in new.items():
            if c.__dict__.get(name, _AN_ITERATOR) is not x:
                setattr(c, name, x)
    elif is_memory(c):
        (value,) = new.values()
        if isinstance(c, bytearray):
            c[:] = value
        elif isinstance(c, array.array):
            c[:] = array.array(c.typecode, value)
        else:
            c[...] = sys.modules["numpy"].frombuffer(value, c.dtype).reshape(c.shape)
    else:
        for name in contents(c).keys() - new.keys():
            object.__delattr__(c, name)
        for name, x in new.items():
            object.__setattr__(c, name, x)


def weakly(x: Any) -> Any:
    """What is held weakly, if it can be; see `held`."""
    if type(x) in PLAIN:
        return x
    with suppress(TypeError):
        return weakref.ref(x)
    return lambda: x


def held(x: Any) -> Any:
    """What `weakly` was given, if it is there still."""
    return x if type(x) in PLAIN else x()
