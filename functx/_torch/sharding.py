"""Private torch API of FSDP2, which is used only if ``torch.distributed.fsdp`` is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# The name of the autograd node of ``DTensor.from_local``, whose class is private.
FROM_LOCAL = "_FromTorchTensorBackward"


def in_process_group() -> bool:
    """Whether this process has joined others: no tensor or module is sharded before that."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def fsdp_classes() -> tuple[type, ...]:
    """The classes of modules that FSDP2 and FSDP1 shard; empty if no module can be sharded."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not in_process_group():
        return ()
    return fsdp.FSDPModule, fsdp.FullyShardedDataParallel


def has_dtensors() -> bool:
    """Whether there can be a DTensor in this process."""
    return "torch.distributed.tensor" in sys.modules


def dtensor_class() -> type:
    """The class of DTensors. Call it only if `has_dtensors`."""
    found: Any = sys.modules["torch.distributed.tensor"]
    return found.DTensor


def managed_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The slots of a module, and of its submodules, in which FSDP2's hooks put parameters.

    Parameters in its ``ignored_params``, and those of modules that it does not shard, are not
    among them. No public API distinguishes them.
    """
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    for part in module.modules():
        if not isinstance(part, fsdp.FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        # Before torch 2.13 a module has one group.
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            for param in group.fsdp_params if group is not None else ():
                slots = param._module_info
                yield slots.module, slots.param_name
                yield from zip(slots.shared_modules, slots.shared_param_names)
