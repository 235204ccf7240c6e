"""Kept values that somebody else holds as well, and may write to.

Without `remat` whoever has what a region gave, or left behind, may write to it, unless a tape reads
it. A policy may have kept it though no tape does. Torch does not count all writes: none by numpy or
through ``.data``, to running statistics, of fused optimizers, and of ``_foreach_`` functions under
a dispatch mode. So a region takes a checksum of each kept value that others hold, and of no other,
and a replay computes anew what has another one by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from functx import _torch
from functx._remat._checksum import bits_of, has_bits
from functx._remat._holders import base_of, held_by_the_engine
from functx._remat._step import has_memory

Shared = tuple[int, Tensor | None]
"""The place of a kept value that others hold, and what bits it had when the region had run."""


def watch_kept(region: Any) -> None:
    """A region has run, and its tape is gone: who holds what it keeps may write to it."""
    if region.kept:
        those = [i for i, t in enumerate(region.kept) if _others_hold(t)]
        region.ledger.shared = [(i, bits_of(region.kept[i])) for i in those]


def written_since(those: Iterable[Shared], kept: Sequence[Tensor]) -> bool:
    """Whether somebody has."""
    return any(not has_bits(base_of(kept[i]), bits) for i, bits in those)


def _others_hold(t: Tensor) -> bool:
    if not has_memory(t) or t.is_meta:  # which has no bits
        return False
    storage = _torch.storage_key(t)
    # One holder is ``t``, one is who counts.
    return _torch.storage_use_count(storage) > held_by_the_engine(storage) + 2
