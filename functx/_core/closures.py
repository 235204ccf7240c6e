"""What the code of a function reads by name: closure cells, globals and defaults."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from functx._core.objects import attributes, is_of

_SPACES = type, types.ModuleType
_NAME_OF_CLASS, _DICT_OF_CLASS = (type.__dict__[n].__get__ for n in ("__name__", "__dict__"))

# Types whose values are compared: a function is traced once for each value.
PLAIN = {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}


def variables(f: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function, or one that it defines, reads by name: cells, globals; and defaults.

    And, as ``settings.scale``, plain values and tensors of the modules and classes among these.
    """
    around, named = f.__globals__, list[tuple[str, Any]]()
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        with suppress(ValueError):  # not bound yet
            named.append((name, cell.cell_contents))
    named += [(name, around[name]) for name in _names(f.__code__) if name in around]
    yield from named
    yield from (("", value) for value in f.__defaults__ or ())
    yield from (f.__kwdefaults__ or {}).items()
    for _, space in named:
        if is_of(space, _SPACES) and not (known := _names_in(space))[0].startswith("torch"):
            for name in _names(f.__code__):
                value = known[1].get(name, f)
                if is_of(value, Tensor) or type(value) in PLAIN:
                    yield f"{known[0]}.{name}", value


def _names_in(space: Any) -> tuple[str, Any]:
    """The name of a module or class and its namespace, without loading a lazy module."""
    if is_of(space, type):
        return _NAME_OF_CLASS(space), _DICT_OF_CLASS(space)
    found = attributes(space) or {}
    return str(found.get("__name__")), found


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*code.co_names, *(name for c in inner for name in _names(c)))
