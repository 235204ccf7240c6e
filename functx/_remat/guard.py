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


class Noted:
    """The depth of torch's stacks, and its modes, at an entry."""

    __slots__ = ("dispatch", "duals", "function", "functorch", "fwd", "grad", "hooks", "nesting")

    def __init__(self) -> None:
        self.function = _torch.function_depth()
        self.dispatch = _torch.dispatch_depth()
        self.functorch = _torch.functorch_depth()
        self.grad = torch.is_grad_enabled()
        self.fwd = _torch.fwd_grad_enabled()
        self.duals = _torch.forward_mode._current_level
        self.nesting = _torch.jvp_levels.JVP_NESTING
        self.hooks: list[Any] = []  # saved-tensor hooks that the entry took off, outermost last

    def cut_back(self, functorch: int | None = None, modes: int = 0) -> None:
        """Undo what was entered since, but for some function modes, and levels to some depth."""
        while _torch.function_depth() > self.function + modes:
            _torch.pop_function_mode()
        while _torch.dispatch_depth() > self.dispatch:
            _torch.pop_dispatch_mode(None)
        levels.leave_to(self.functorch if functorch is None else functorch)
        self.settle()
        self.put_hooks_back()

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
