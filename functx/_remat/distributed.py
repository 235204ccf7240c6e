"""Modules that move their parameters: regions go inside of them, never around (rule 4)."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from functx import _torch
from functx._errors import RematError
from functx._remat.operators import storage_of

# What torch.distributed calls its work in profiles, where a region sees it begin.
_LABELS = {
    "FSDP::": "fully_shard (FSDP2)",
    "FullyShardedDataParallel.": "FullyShardedDataParallel",
    "DistributedDataParallel.": "DistributedDataParallel",
}


def check(label: str, title: str) -> None:
    """Refuse a region around the forward of such a module, which begins with ``label``."""
    for prefix, kind in _LABELS.items():
        if label.startswith(prefix):
            raise RematError(
                f"remat: {title} is around a module of {kind}, which communicates when it is "
                "called, and would again in a replay. Swap the order: make regions inside of it, "
                f"and leave {kind} outside (functx.apply_remat(module, ...) does that, before or "
                "after it is wrapped)."
            )


def guarded(f: Any) -> Any:
    """What a replay runs: of a module with hooks, an error where its parameters were swapped.

    Hooks that offload parameters set their ``data``, which changes no version.
    """
    module = f.__self__ if type(f) is MethodType else None
    if not isinstance(module, nn.Module) or not (
        module._forward_hooks or module._forward_pre_hooks
    ):
        return f
    found = [(p, storage_of(p)) for p in module.parameters() if _torch.level_of(p) <= 0]

    def again(*args: Any, **kwargs: Any) -> Any:
        if any(storage_of(p) != storage for p, storage in found):
            raise RematError(
                f"remat: hooks of {type(module).__name__} swap the data of its parameters between "
                "the forward and the backward (offloading, sharding). Put the regions inside of "
                "the module, around what it calls, not around the module."
            )
        return f(*args, **kwargs)

    return again
