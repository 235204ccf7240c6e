"""Describes the modes and flags around a call, and its tensors: a graph depends on both (J5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._core import norm_derivatives
from functx._torch import compiler

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
_hooks_of_all_modules = compiler.HOOKS_OF_ALL_MODULES
_getters = _torch.QUICK + _torch.BACKENDS


def around() -> str | None:
    """The mode or hook around a call, if any, that must see each operation: the call runs in eager.

    A graph would hide the operations from it.
    """
    if _torch.function_depth():
        for i in range(_torch.function_depth()):
            mode = _torch.function_mode_at(i)
            if not isinstance(mode, _torch.DeviceContext) and not _is_known(mode):
                return f"a function mode, {type(mode).__name__}"
    if _torch.dispatch_depth():
        for i in range(_torch.dispatch_depth()):
            mode = _torch.dispatch_mode_at(i)
            if not _is_known(mode):
                return f"a dispatch mode, {type(mode).__name__}"
    if any(_hooks_of_all_modules):
        return "hooks of all modules (torch.nn.modules.module.register_module_...)"
    if _torch.parametrizations_are_cached():
        return "torch.nn.utils.parametrize.cached()"
    return None


def _is_known(mode: Any) -> bool:
    module = type(mode).__module__
    return module.startswith(("functx.", "torch.profiler", "torch.autograd.profiler"))


def surroundings() -> tuple[Any, ...]:
    """The modes, defaults and flags that a graph depends on. If equal, calls may share a graph."""
    casts = device = norms = None
    if _torch.any_autocast():
        enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        casts = [(enabled(d), dtype(d)) for d in _AUTOCAST_DEVICES]
    if _torch.function_depth():
        device, norms = _torch.default_device(), norm_derivatives.are_defined()
    values = [getter() for getter in _getters]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts, device, norms, values


def described(t: Tensor, sized: bool) -> tuple[Any, ...]:
    """Everything about a tensor that a graph depends on, except its values.

    With ``sized``, shape and strides are included; otherwise sizes are symbols of the graph.
    """
    kind = (type(t), t.dtype, t.device, t.layout, t.is_conj(), t.is_neg(), t.is_inference())
    if not sized or t.layout is not torch.strided:
        return (*kind, t.dim() if not sized else t.shape)
    return (*kind, t.shape, t.stride())


def alike(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the index of the first occurrence of the same tensor."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(t), i) for i, t in enumerate(tensors)])


def base_of(t: Tensor) -> Tensor:
    """The plain tensor inside of all wrappers of transforms."""
    while _torch.level_of(t) > 0:
        t = _torch.inner_of(t)
    return t
