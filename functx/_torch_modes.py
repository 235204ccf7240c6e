"""Private names of modes: entering and leaving them with little Python; beside `_torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _python_dispatch as _dispatch

from functx import _torch

# What a mode of functions does when it is entered and left.
push_function_mode = torch._C._push_on_torch_function_stack
pop_function_mode = torch._C._pop_torch_function_stack

# Run operators as a node of a tape does when nothing is recorded: by their kernels.
below_autograd = torch._C._AutoDispatchBelowAutograd

# What torch knows of the dispatch modes that are active: it is all that entering one changes
# beside the stack. Where a torch has other such flags, its own way is taken.
_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
LEAN = tuple(name for name in vars(_dispatch) if name.startswith("_is_in_")) == _FLAGS

Flags = tuple[bool, bool, bool]
_NONE: Flags = (False, False, False)


def enter_dispatch_mode(mode: Any) -> Flags:
    """Enter a mode that is no part of torch's own; what `leave_dispatch_mode` puts back."""
    d: Any = _dispatch
    before = (
        d._is_in_torch_dispatch_mode,
        d._is_in_non_infra_torch_dispatch_mode,
        d._is_in_any_mode_without_ignore_compile_internals,
    )
    d._is_in_torch_dispatch_mode = d._is_in_non_infra_torch_dispatch_mode = True
    d._is_in_any_mode_without_ignore_compile_internals = True
    d.set_is_in_mode_without_ignore_compile_internals(True)
    d._push_on_torch_dispatch_stack(mode)
    return before


def leave_dispatch_mode(before: Flags) -> None:
    """Leave the mode that was entered last.

    The flags are the process's, so what another thread found and puts back may be a mode of ours
    that is gone by then: where this thread is in no mode, they say so.
    """
    d: Any = _dispatch
    d._pop_torch_dispatch_stack(None)
    if not torch._C._len_torch_dispatch_stack():
        before = _NONE
    (
        d._is_in_torch_dispatch_mode,
        d._is_in_non_infra_torch_dispatch_mode,
        d._is_in_any_mode_without_ignore_compile_internals,
    ) = before
    d.set_is_in_mode_without_ignore_compile_internals(before[2])


def user_modes() -> list[Any]:
    """The active function and dispatch modes that may change what operations do."""
    if not (_torch.function_mode_depth() or _torch.dispatch_mode_depth()):
        return []
    return [
        mode
        for depth, mode_at in (
            (_torch.function_mode_depth(), _torch.get_function_mode_at),
            (_torch.dispatch_mode_depth(), _torch.get_dispatch_mode_at),
        )
        for mode in map(mode_at, range(depth))
        if not getattr(mode, "only_observes", False)
    ]


def missing_modes(modes: list[Any]) -> list[Any]:
    """Which of some modes are not active now, nor another of their kind.

    A counter of FLOPs that has been left is not to count any more.
    """
    active = {type(mode) for mode in user_modes()} if modes else set()
    return [
        mode
        for mode in modes
        if type(mode) not in active and type(mode).__name__ != "_FlopCounterMode"
    ]
