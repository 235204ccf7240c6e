"""Kept values that somebody else holds as well, and may write to.

Without `remat` whoever has what a region gave, or left behind, may write to it, unless a tape reads
it. A policy may have kept it though no tape does. A kept value is an alias for which torch counts
no writes; so a tensor that has the version of what others hold, without its memory, is a witness,
and a replay computes anew what has been written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._remat._step import has_memory
from functx._remat._tangents import tangent_of
from functx._remat._tracker import SILENT, tracking

Witness = tuple[Tensor, int]
"""A tensor that has the version of another one, and that version when a region had run."""


def watch_kept(region: Any, results: Sequence[Tensor | None]) -> None:
    """A region has run, and its tape is gone: who holds what it keeps may write to it.

    Args:
        region: which has kept something, or not.
        results: of its body.
    """
    if region.kept:
        births = (ref() for _, ref, _ in region.births)
        held = [t for t in (*results, *births) if t is not None]
        region.ledger.witnesses = _witnesses(region.kept, held)


def written_since(those: Iterable[Witness]) -> bool:
    """Whether somebody has."""
    return any(_torch.version(t) != version for t, version in those)


def _witnesses(kept: Sequence[Tensor], stack: list[Tensor]) -> list[Witness]:
    memory = {_torch.storage_key(t) for t in kept if has_memory(t)}
    found, dual = [], _torch.forward_ad_level() >= 0
    for t in stack:  # which grows
        if _torch.is_wrapped(t):
            stack.append(_torch.get_unwrapped(t))
        elif has_memory(t) and _torch.storage_key(t) in memory and not t.is_inference():
            found.append((_off_its_memory(t), _torch.version(t)))
        if dual and (tangent := tangent_of(t)) is not None:
            stack.append(tangent)
    return found


def _off_its_memory(t: Tensor) -> Tensor:
    with tracking(SILENT), _torch.without_modes(), _torch.cleared_interpreter_stack():
        with _torch.set_forward_grad_enabled(False):
            alias = t.detach()
        alias.data = torch.empty(0, dtype=t.dtype, device=t.device)
    return alias
