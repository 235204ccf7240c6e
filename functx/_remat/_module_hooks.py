"""Hooks of modules: those that the forward of a region found are those of its replays.

NOTE [hooks of modules]
A backward hook of a module is called if it was there when the module ran. So a replay runs modules
with the hooks that they had when the forward began: not with those that were hung since, by the
program or by the forward itself (a replay hangs its own then), and with those that were removed. As
a tape does, a region holds backward hooks. No tape holds forward hooks, which may have what has
left the region: these are known weakly, and one that is gone leaves a replay with other operations,
or did nothing. To whoever removes a hook that a replay has hung, it is the one that the forward has
hung.
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

    __slots__ = ("_hung", "_modules", "_next", "_ones", "_then")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._next = _torch_modules.next_hook()
        self._then: list[tuple[Hooks, dict[int, Callable[[], Any]]]] = [
            (d, {key: _held_by(name, hook) for key, hook in d.items()}) for name, d in self._now()
        ]
        self._hung: list[tuple[Hooks, list[int]]] = []
        self._ones: list[Any] = []

    def _now(self) -> list[tuple[str, Hooks]]:
        """All dicts of the modules that there are hooks in, with their names."""
        if not _torch_modules.have_hooks(self._modules):  # as most
            return []
        return [those for m in self._modules for those in _torch_modules.dicts_of_hooks(m).items()]

    def seal(self) -> None:
        """The run ended."""
        if self._next != _torch_modules.next_hook():
            for _, d in self._now():
                if hung := [key for key in d if key >= self._next]:
                    self._hung.append((d, hung))

    def differ(self) -> bool:
        """Whether a replay would not find what the run found."""
        if self._hung:
            return True
        now, then = self._now(), self._then
        return len(now) != len(then) or any(
            d is not known or [*d] != [*keys] for (_, d), (known, keys) in zip(now, then)
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As the run found them; afterwards as they are."""
        there = [*(d for _, d in self._now()), *(d for d, _ in self._then)]
        held = {id(d): (d, dict(d)) for d in there}
        for d in there:
            d.clear()
        try:
            for d, known in self._then:
                now = held[id(d)][1]
                found = {key: now[key] if key in now else hook() for key, hook in known.items()}
                d.update({key: hook for key, hook in found.items() if hook is not None})
            with _torch_modules.handles_made() as made:
                yield
            self._ones += _torch_modules.are_one(made, self._hung)
        finally:
            for _, d in self._now():
                d.clear()
            for d, hooks in held.values():
                d.clear()
                d.update(hooks)


def _held_by(name: str, hook: Any) -> Callable[[], Any]:
    """What gives a hook that is in the dict of that name, if it is there still."""
    if isinstance(hook, bool) or not name.startswith("_forward"):
        return lambda: hook
    if isinstance(hook, types.MethodType):
        return weakref.WeakMethod(hook)
    try:
        return weakref.ref(hook)
    except TypeError:  # of a class with slots
        return lambda: None
