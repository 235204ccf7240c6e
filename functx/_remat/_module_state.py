"""Attributes of modules that a forward rebinds: ``self.u = u / u.norm()``, ``self.calls += 1``.

What a region counts, it counts once. The first run notes which attributes and buffers of the
modules it can reach it has rebound, and to what they were bound before. A replay starts from
there, and puts back what it found.
"""

from __future__ import annotations

import functools
import operator
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from functx import _torch_modules
from functx._remat._options import Options

_MISSING = object()
_HOLD_NONE = (type(None), types.BuiltinFunctionType, bool, int, float, str, Options)
_LARGE = 256  # data, then, rather than modules
_replaying = threading.RLock()  # modules are shared; two replays must not rebind them at once

_NO_OBJECTS = (type, types.ModuleType, Tensor)
_NOT_THE_USERS = frozenset({"builtins", "torch", "numpy", "functools"})

# A dict of a module, its key, and what was bound there.
Change = tuple[dict[str, Any], str, Any]


def reachable(f: Any, arguments: Iterable[Any]) -> list[nn.Module]:
    """Modules that a function reaches: in cells, defaults and globals, as owner, as argument.

    And in lists, tuples, dicts and attributes of objects found there, if they are not large.
    """
    found: dict[int, nn.Module] = {}
    stack = [part for part in (f, *arguments) if not isinstance(part, _HOLD_NONE)]
    seen: set[int] = set()
    while stack:
        part = stack.pop()
        key, kind = id(part), type(part)
        if key in seen:
            continue
        seen.add(key)
        if kind is types.FunctionType:
            if part.__defaults__ is not None:
                stack += part.__defaults__
            if part.__kwdefaults__ is not None:
                stack += part.__kwdefaults__.values()
            for cell in part.__closure__ or ():
                try:
                    stack.append(cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
            scope = part.__globals__
            for name in part.__code__.co_names:
                value = scope.get(name)
                if value is not None and isinstance(value, (nn.Module, list, tuple, dict)):
                    stack.append(value)
        elif isinstance(part, _HOLD_NONE):
            continue
        elif kind is list or kind is tuple or kind is dict:
            if len(part) <= _LARGE:
                stack += part.values() if kind is dict else part
        elif isinstance(part, nn.Module):
            for module in _torch_modules.modules_of(part):
                found[id(module)] = module
        elif kind is types.MethodType:
            stack += (part.__func__, part.__self__)
        elif isinstance(part, functools.partial):
            stack += (part.func, *part.args, *part.keywords.values())
        elif len(seen) <= _LARGE:
            stack += _attributes(part)
    return list(found.values())


def _attributes(part: Any) -> list[Any]:
    """What an object of the user's holds."""
    kind = type(part)
    if kind.__module__.partition(".")[0] in _NOT_THE_USERS or isinstance(part, _NO_OBJECTS):
        return []
    found = list(getattr(part, "__dict__", {}).values())
    slots = getattr(kind, "__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        found.append(getattr(part, name, None))
    return found


class ModuleState:
    """The bindings of some modules before a run, and what it changed."""

    __slots__ = ("_before", "changes")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [
            (d, dict(d)) for m in modules for d in (m.__dict__, _torch_modules.buffers_of(m))
        ]
        self.changes: list[Change] = []

    def seal(self, written: set[int]) -> None:
        """The first run ended.

        Args:
            written: ids of tensors that were written to in place. ``self.calls += 1`` writes, and
                binds the result to the name it had; in a replay, that is the replay's own copy.
        """
        for d, before in self._before:
            # In C, for most: the same names in the same order, bound to the same.
            if not written and len(d) == len(before):
                same = map(operator.is_, before.values(), d.values())
                if all(map(operator.is_, before, d)) and all(same):
                    continue
            for key in before.keys() | d.keys():
                was, now = before.get(key, _MISSING), d.get(key, _MISSING)
                if was is not now or id(now) in written:
                    # Its value only: a tape of the step before must not live on in this one.
                    taped = isinstance(was, Tensor) and was.grad_fn is not None
                    self.changes.append((d, key, was.detach() if taped else was))
        self._before.clear()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As the first run found it; put back afterwards."""
        if not self.changes:
            yield
            return
        with _replaying:
            now = [(d, key, d.get(key, _MISSING)) for d, key, _ in self.changes]
            _bind(self.changes)
            try:
                yield
            finally:
                _bind(now)


def _bind(changes: Iterable[Change]) -> None:
    for d, key, value in changes:
        if value is _MISSING:
            d.pop(key, None)
        else:
            d[key] = value
