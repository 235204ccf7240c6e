"""Modules that move their parameters between processes: regions go inside of them, never around.

They communicate in hooks when they are called, and count on being called once a pass; a replay of a
region around one would call it again, in the middle of a backward pass.
"""

from __future__ import annotations

from functx._errors import RematError

# What torch.distributed calls its own work in profiles, where a region sees it run.
_KINDS = {
    "FSDP::": "fully_shard (FSDP2)",
    "FullyShardedDataParallel.": "FullyShardedDataParallel",
    "DistributedDataParallel.": "DistributedDataParallel",
}


def refuse(label: str, region: str) -> None:
    """Raise if what begins in a region, by its label in profiles, is such a module's forward."""
    for prefix, kind in _KINDS.items():
        if label.startswith(prefix):
            raise RematError(
                f"remat: the region {region!r} is around a module of {kind}, which communicates "
                "when it is called, and would again in a replay. Swap the order: make regions "
                f"inside of it, and leave {kind} outside (functx.apply_remat(module, ...) does "
                "that, before or after it is wrapped)."
            )
