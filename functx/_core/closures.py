"""The variables that the code of a function reads by name: closure cells, globals and defaults."""

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
    """Name and value of each variable that ``f``, or a function defined in it, reads by name.

    These are closure cells and globals; defaults follow, with the name ``""`` if positional. For
    each module or class among them, its tensors and plain values that the code may read are listed
    as well, under names such as ``settings.scale``.
    """
    around, named = f.__globals__, list[tuple[str, Any]]()
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
        with suppress(ValueError):  # the cell is not bound yet
            named.append((name, cell.cell_contents))
    named += [(name, around[name]) for name in _names(f.__code__) if name in around]
    yield from named
    yield from (("", value) for value in f.__defaults__ or ())
    yield from (f.__kwdefaults__ or {}).items()
    for _, space in named:
        if not is_of(space, _SPACES):
            continue
        name_of_space, contents = _namespace(space)
        if not name_of_space.startswith("torch"):
            for name in _names(f.__code__):
                value = contents.get(name, f)  # `f` is neither a tensor nor plain
                if is_of(value, Tensor) or type(value) in PLAIN:
                    yield f"{name_of_space}.{name}", value


def _namespace(space: Any) -> tuple[str, Any]:
    """The name of a module or class and its namespace, without loading a lazy module."""
    if is_of(space, type):
        return _NAME_OF_CLASS(space), _DICT_OF_CLASS(space)
    found = attributes(space) or {}
    return str(found.get("__name__")), found


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return (*code.co_names, *(name for c in inner for name in _names(c)))
