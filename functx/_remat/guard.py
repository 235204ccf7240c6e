"""After an exception or an interrupt, torch is as it was.

NOTE [guard]
An interrupt can come between any two lines, so a ``finally`` that pops may pop what somebody else
has pushed. Each entry into the engine (a forward, a replay, a pullback) notes how deep torch's
stacks are and which modes are on; on any exception it cuts back to that.
"""

from __future__ import annotations

from typing import Any

import torch

from functx import _torch
from functx._remat import levels
from functx._remat.settings import Settings


class Entry:
    """The depth of torch's stacks, its modes and settings, at an entry: a context.

    Attributes:
        settings: what torch had set.
        outer: the listener of the region around, which sleeps in the context.
        restored: generators that were set back, if any.
    """

    __slots__ = (
        *("dispatch", "duals", "function", "functorch", "fwd", "grad", "hooks", "nesting"),
        *("outer", "restored", "settings", "uncached"),
    )

    def __init__(self, outer: Any) -> None:
        self.function = _torch.function_depth()
        self.dispatch = _torch.dispatch_depth()
        self.functorch = _torch.functorch_depth()
        self.grad = torch.is_grad_enabled()
        self.fwd = _torch.fwd_grad_enabled()
        self.duals = _torch.forward_mode._current_level
        self.nesting = _torch.jvp_levels.JVP_NESTING
        self.hooks: list[Any] = []  # saved-tensor hooks that the entry took off, outermost last
        self.settings = Settings()
        self.outer, self.restored, self.uncached = outer, None, False

    def __enter__(self) -> Entry:
        if self.outer is not None:
            self.outer.asleep = True
        return self

    def __exit__(self, kind: Any, *raised: object) -> None:
        if kind is not None:
            self.cut_back()
            self.settings.put(Settings())
        if self.restored is not None:
            self.restored.put_back()
        if self.hooks:
            self.put_hooks_back()
        if self.uncached:
            torch.set_autocast_cache_enabled(True)
        if self.outer is not None:
            self.outer.asleep = False

    def stop_caching(self, settings: Settings) -> None:
        """Do without autocast's cache of casted weights.

        Whether a cast runs would show in a replay, and one made in a region would be on its tape.
        """
        if settings.caches:
            self.uncached = True
            torch.set_autocast_cache_enabled(False)

    def cut_back(self, functorch: int | None = None, modes: int = 0) -> None:
        """Undo what was entered since, but for some function modes, and levels to some depth."""
        while _torch.function_depth() > self.function + modes:
            _torch.pop_function_mode()
        while _torch.dispatch_depth() > self.dispatch:
            _torch.pop_dispatch_mode(None)
        levels.leave_to(self.functorch if functorch is None else functorch)
        self.settle()

    def settle(self) -> None:
        """Put the modes back that levels change."""
        if self.duals != _torch.dual_level() or self.nesting != _torch.jvp_nesting():
            _torch.close_jvp_levels(self.duals, self.nesting)
        if self.fwd != _torch.fwd_grad_enabled():
            _torch.set_fwd_grad_enabled(self.fwd)
        _torch.set_grad_enabled(self.grad)

    def take_hooks(self) -> None:
        """Take off the saved-tensor hooks around: they are for what is kept, which a node saves."""
        while (hooks := _torch.top_saved_tensor_hooks(True)) is not None:
            self.hooks.append(hooks)
            _torch.pop_saved_tensor_hooks()

    def put_hooks_back(self) -> None:
        """Undo `take_hooks`."""
        while self.hooks:
            _torch.push_saved_tensor_hooks(*self.hooks[-1])
            self.hooks.pop()
