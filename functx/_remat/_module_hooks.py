"""Hooks of modules: those that the forward of a region found are those of its replays.

NOTE [hooks of modules]
A backward hook of a module is called if it was there when the module ran. So a replay runs modules
with the hooks that they had when the forward began: not with those that were hung since, by the
program or by the forward itself (a replay hangs its own then), and with those that were removed. As
a tape does, a region holds the backward hooks of modules that ran (`OneHook`). Others are known
weakly, as modules are: a forward hook may have what has left the region. One that is gone leaves a
replay with other operations, or did nothing. To whoever removes a hook that a replay has hung, it
is the one that the forward has hung.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from functx import _torch_modules

Hooks = dict[int, Any]
"""Of a module, by their numbers."""


class ModuleHooks:
    """What hooks modules have before a run, and which ones it hangs.

    Args:
        modules: what the run reaches.
    """

    __slots__ = ("_hung", "_modules", "_next", "_then")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [*map(weakref.ref, modules)]
        self._next = _torch_modules.next_hook()
        self._then: list[tuple[weakref.ref[nn.Module], str, dict[int, Callable[[], Any]]]] = [
            (weakref.ref(m), name, {key: _weakly(hook) for key, hook in d.items()})
            for m, name, d in _there(modules)
        ]
        self._hung: list[tuple[weakref.ref[nn.Module], str, list[int]]] = []

    def _now(self) -> list[tuple[nn.Module, str, Hooks]]:
        """Those of the modules that are there still."""
        return _there([m for ref in self._modules if (m := ref()) is not None])

    def seal(self) -> None:
        """The run ended."""
        if self._next != _torch_modules.next_hook():
            for m, name, d in self._now():
                if hung := sorted(key for key in d if key >= self._next):
                    self._hung.append((weakref.ref(m), name, hung))

    def differ(self) -> bool:
        """Whether a replay would not find what the run found."""
        if self._hung:
            return True
        now, then = self._now(), self._then
        return len(now) != len(then) or any(
            m is not ref()
            or name != known
            or [*d] != [*hooks]
            or not all(map(_is_same, d.values(), hooks.values()))
            for (m, name, d), (ref, known, hooks) in zip(now, then)
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As the run found them; afterwards as they are."""
        then: dict[tuple[int, str], Hooks] = {}
        there = {(id(m), name): d for m, name, d in self._now()}
        for ref, name, hooks in self._then:
            if (m := ref()) is not None:
                found = {key: hook() for key, hook in hooks.items()}
                then[id(m), name] = {key: x for key, x in found.items() if x is not None}
                there[id(m), name] = m.__dict__[name]
        held = [(d, then.get(place, {}), dict(d)) for place, d in there.items()]
        known = {*map(id, there.values())}
        made: list[Any] = []
        try:
            for d, found, _ in held:
                _become(d, found)
            with _torch_modules.handles_made(made):
                yield
            hung = [
                (m.__dict__[name], keys)
                for ref, name, keys in self._hung
                if (m := ref()) is not None
            ]
            _torch_modules.are_one(made, hung)
        finally:
            held += [(d, {}, {}) for _, _, d in self._now() if id(d) not in known]
            own = {handle.id for handle in made}
            for d, found, before in held:
                # Other threads may have hung some, and removed some, meanwhile.
                back = {key: hook for key, hook in before.items() if key in d or key not in found}
                new = {k: x for k, x in d.items() if k not in found and k not in own}
                _become(d, back | new)


def _there(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, Hooks]]:
    """The dicts of modules that there are hooks in."""
    if not _torch_modules.have_hooks(modules):  # as in most
        return []
    return [(m, *those) for m in modules for those in _torch_modules.dicts_of_hooks(m).items()]


def _become(d: Hooks, hooks: Hooks) -> None:
    if [*d.items()] != [*hooks.items()]:
        d.clear()
        d.update(hooks)


def _weakly(hook: Any) -> Callable[[], Any]:
    """What gives a hook, or what is said of one, if it is there still."""
    if isinstance(hook, bool):
        return lambda: hook
    if isinstance(hook, types.MethodType):
        return weakref.WeakMethod(hook)
    try:
        return weakref.ref(hook)
    except TypeError:  # of a class with slots
        return lambda: None


def _is_same(hook: Any, known: Callable[[], Any]) -> bool:
    was = known()
    return hook is was or (isinstance(hook, types.MethodType) and hook == was)
