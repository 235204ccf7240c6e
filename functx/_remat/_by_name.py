"""What the code of a function reaches by the names in it."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from functx._places import is_internal
from functx._remat._code_names import names_in

_LISTS = (list, tuple, set, deque)
_DICTS = (dict, defaultdict, OrderedDict)
_NOTHING = (type, types.ModuleType, types.BuiltinFunctionType, Tensor, int, float, str, type(None))


def named_by(f: Any) -> set[int]:
    """Ids of what the code of a function, and of functions that it names, reaches by name.

    In closures, defaults and globals, and as attributes, by their names, of what is found there.
    """
    found: dict[int, Any] = {}
    names: set[str] = set()
    stack = [f]
    owners: set[int] = set()  # of methods; they are not called themselves, for all that is known
    looked = 0
    while stack:
        x = stack.pop()
        if id(x) in found or isinstance(x, _NOTHING):
            continue
        found[id(x)] = x
        if isinstance(x, functools.partial):
            stack += (x.func, *x.args, *x.keywords.values())
        elif isinstance(x, types.MethodType):
            owners.add(id(x.__self__))
            stack += (x.__func__, x.__self__)
        elif isinstance(x, types.FunctionType):
            if not is_internal[x.__code__.co_filename]:
                read = names_in(x.__code__)[0]
                names.update(read)
                stack += [x.__globals__[n] for n in x.__globals__.keys() & read]
            stack += (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
            for cell in x.__closure__ or ():
                try:
                    stack.append(cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
        elif type(x) in _LISTS:
            stack += x
        elif type(x) in _DICTS:
            stack += x.values()
        if not stack and looked != (looked := len(names) + len(found)):
            for one in [*found.values()]:
                stack += _named_attributes(one, names, called=id(one) not in owners)
    return {*found}


def _named_attributes(one: Any, names: set[str], called: bool) -> list[Any]:
    """Those attributes of an object that have one of some names, and what calling it runs."""
    if type(one) in _LISTS or isinstance(one, (types.FunctionType, types.MethodType)):
        return []
    own = getattr(one, "__dict__", {})
    found = [own[name] for name in names & own.keys()]
    runs = ("forward", "__call__") if called else ()
    for name in (*names, *runs):
        method = getattr(type(one), name, None)
        if isinstance(method, types.FunctionType):
            found.append(method)
    if isinstance(one, torch.nn.Module):
        found += [child for name, child in one.named_children() if called or name in names]
    return found
