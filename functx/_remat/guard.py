"""The state of torch around a call: its settings, and the depths of its stacks.

A replay runs under the settings of its forward (rule 1). The list of `Settings` is complete:
autocast, default device and dtype, SDPA backends, deterministic algorithms and the precision of
matrix products. Grad mode is always on in a replay: without it, the forward would not have been a
region.

NOTE [guard]
An interrupt can come between any two lines. Then a ``finally`` that pops a mode may pop one that
other code has pushed. So each forward and each replay notes the depths of torch's stacks and the
active modes when it starts, and cuts the stacks back to them on any exception. This restores the
state of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from functx import _torch
from functx._core import NormsByDefinition, NormsInOneDtype, is_internal, norm_derivatives
from functx._remat import levels

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


class Settings(NamedTuple):
    """The settings of torch at one time. They are compared as a whole."""

    flags: tuple[Any, ...]
    casts: Any  # by device, whether autocast is enabled, and its dtype; ``None`` without autocast
    caches: bool  # whether autocast keeps the casts of weights
    device: torch.device | None  # of ``with torch.device(...)``
    norms: int  # what is done with normalisations; see `norm_derivatives`

    def modes(self, now: Settings) -> list[Any]:
        """The function modes that a replay needs if the current settings are ``now``."""
        same = self.device == now.device
        return [] if same else [_torch.DeviceContext(self.device or torch.device("cpu"))]

    def put(self, now: Settings) -> None:
        """Apply these settings, if the current ones are ``now``."""
        if self.flags != now.flags:
            for (_, write), wanted, value in zip(_torch.FLAGS, self.flags, now.flags):
                if wanted != value:
                    write(wanted)
        if self.casts != now.casts:
            for device in _AUTOCAST_DEVICES:
                enabled, dtype = (False, None) if self.casts is None else self.casts[device]
                torch.set_autocast_enabled(device, enabled)
                if dtype is not None:
                    torch.set_autocast_dtype(device, dtype)


def settings_now() -> Settings:
    """The current settings."""
    casts, caches, device, norms = None, False, None, 0
    if _torch.any_autocast():
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        casts = {d: (enabled(d), dtype(d)) for d in _AUTOCAST_DEVICES}
        caches = torch.is_autocast_cache_enabled()
    if _torch.function_depth():  # else no mode is on: neither a device nor one for normalisations
        device, norms = _torch.default_device(), norm_derivatives.are_defined()
    # (`tuple.__new__` is what the class would call.)
    return tuple.__new__(Settings, (_torch.flags_now(), casts, caches, device, norms))


def finish_interrupted() -> None:
    """End torch's and functx's own contexts that an interrupt has cut off while they ended.

    Called while an exception is handled. Without it, such a generator runs the code after its
    ``yield`` when Python collects it, some time later: torch would push a function mode then. The
    user's contexts are left to Python (rule 5).
    """
    traceback = sys.exc_info()[2]
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in _GENERATORS:
            # (The context may raise an error, or may not be set yet.)
            with suppress(Exception):
                context = frame.f_locals["self"].gen
                if is_internal(context.gi_code.co_filename):
                    context.close()
        elif frame.f_code is _FLAG:
            frame.f_locals["self"].__exit__()
        traceback = traceback.tb_next


_OF_A_GENERATOR: Any = type(contextmanager(lambda: iter(()))())
_GENERATORS = {_OF_A_GENERATOR.__enter__.__code__, _OF_A_GENERATOR.__exit__.__code__}
_FLAG = _torch.RequiresGradAllowed.__exit__.__code__


class StackGuard:
    """The depth of torch's stacks, its modes and settings, at an entry.

    A context; what runs often calls `failed` and `end` itself.
    """

    hooks: Sequence[Any] = ()  # saved-tensor hooks that the entry took off, outermost last
    norms: Any = None  # the function mode for norms, which the entry took off, too
    restored: Any = None  # the generators whose states were set
    uncached = False  # whether autocast's cache was switched off
    took = False  # whether there is anything to restore at the end
    outer: Any = None  # the listener of the enclosing region, which sleeps in this context

    def __init__(self, outer: Any) -> None:
        self.stacks = stacks = _torch.stacks()
        self.function, self.dispatch, self.functorch = stacks[0], stacks[1], stacks[2]
        self.settings: Settings = settings_now()
        if outer is not None:
            self.outer, self.took = outer, True
            outer.sleep()

    def __enter__(self) -> StackGuard:
        return self

    def __exit__(self, kind: Any, *raised: object) -> None:
        if kind is not None:
            self.failed()
        self.end()

    def failed(self) -> None:
        """Restore everything after an exception or an interrupt."""
        finish_interrupted()
        self.cut_back()
        self.settings.put(settings_now())

    def end(self) -> None:
        """Restore what the entry has changed."""
        if self.restored is not None:
            self.restored.put_back()
        while self.hooks:
            _torch.push_saved_tensor_hooks(*self.hooks[-1])
            self.hooks = self.hooks[:-1]
        if self.norms is not None:
            _torch.push_function_mode(self.norms)
        if self.uncached:
            torch.set_autocast_cache_enabled(True)
        if self.outer is not None:
            self.outer.wake()

    def stop_caching(self) -> None:
        """Do without autocast's cache: with it replays cast less, and casts outlive their tape."""
        self.uncached = self.took = True
        torch.set_autocast_cache_enabled(False)

    def cut_back(self, modes: int = 0) -> None:
        """Leave all that was entered since, except for the first ``modes`` function modes."""
        while _torch.function_depth() > self.function + modes:
            _torch.pop_function_mode()
        while _torch.dispatch_depth() > self.dispatch:
            _torch.pop_dispatch_mode(None)
        levels.leave_to(self.functorch)
        self.settle()

    def settle(self) -> None:
        """Restore the modes that levels change."""
        now = _torch.stacks()[3:]
        grad, forward_mode, duals, nesting = self.stacks[3:]
        if now == (grad, forward_mode, duals, nesting):
            return
        if now[2:] != (duals, nesting):
            _torch.close_jvp_levels(duals, nesting)
        _torch.set_fwd_grad_enabled(forward_mode)
        _torch.set_grad_enabled(grad)

    def take_hooks(self) -> None:
        """Take off the saved-tensor hooks around until the exit: they are for what nodes save."""
        while (hooks := _torch.top_saved_tensor_hooks(True)) is not None:
            self.hooks, self.took = [*self.hooks, hooks], True
            _torch.pop_saved_tensor_hooks()

    def take_norms(self) -> None:
        """Take off the function mode for norms, which would see the engine: listeners stand in."""
        top = _torch.function_mode_at(self.function - 1)
        if type(top) in (NormsByDefinition, NormsInOneDtype):
            self.function, self.norms, self.took = self.function - 1, top, True
            _torch.pop_function_mode()
