"""Modules that move their parameters: regions go inside of them, never around (rule 4)."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from functx import _torch
from functx._errors import RematError

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
                f"remat: {title} is around a module of {kind}, which would communicate again in a "
                f"replay. Swap the order: make regions inside of it, and leave {kind} outside, as "
                "functx.apply_remat(module, ...) does, before or after it is wrapped."
            )


def guarded(f: Any) -> Any:
    """What a replay runs: of a module with hooks, an error where they swapped its parameters."""
    module: Any = f.__self__ if type(f) is MethodType else None
    is_module = isinstance(module, nn.Module)
    if not is_module or not (module._forward_hooks or module._forward_pre_hooks):
        return f
    # (Hooks that offload parameters set their ``data``, which changes no version.)
    found = [(p, _torch.storage_of(p)) for p in module.parameters() if _torch.level_of(p) <= 0]

    def again(*args: Any, **kwargs: Any) -> Any:
        if any(_torch.storage_of(p) != storage for p, storage in found):
            raise RematError(
                f"remat: hooks of {type(module).__name__} swap the data of its parameters between "
                "forward and backward (offloading, sharding). Put regions inside, not around it."
            )
        return f(*args, **kwargs)

    return again
