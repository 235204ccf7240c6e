"""The tangents of a tensor, which sit beside it: no operation's arguments or results show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from functx import _torch, _torch_vmap
from functx._remat._holders import held_by_the_engine
from functx._remat._levels import at_level
from functx._remat._step import has_memory


def unpack(t: Tensor) -> tuple[Tensor, Tensor | None]:
    """The primal, and the tangent if there is one, with their history."""
    if not _torch_vmap.is_legacy_batched(t):
        with torch.enable_grad():  # it gives views
            return forward_ad.unpack_dual(t)
    level = _torch_vmap.legacy_vmap_level()
    if not level:
        return t, None
    primal, tangent = unpack(_torch_vmap.remove_legacy_batch_dim(t, level, 0, 0))
    if tangent is None:
        return t, None
    return (
        _torch_vmap.add_legacy_batch_dim(primal, 0, level),
        _torch_vmap.add_legacy_batch_dim(tangent, 0, level),
    )


def has_tangents(t: Tensor) -> bool:
    """Whether ``t``, or what it wraps, has a tangent."""
    return tangent_of(t) is not None or (
        _torch.is_wrapped(t) and has_tangents(_torch.get_unwrapped(t))
    )


def memory_of_duals(results: Sequence[Tensor]) -> tuple[list[set[int]], set[int]]:
    """For each result, the memory of it and of its tangents; and which of that a tape holds.

    As `held_by_a_tape` tells it of results without tangents. Whoever holds a dual holds its tangent
    as well, of which there is no other trace.
    """
    parts: dict[int, list[Tensor]] = {}
    nodes: dict[int, Tensor] = {}
    stack = [*results]
    while stack:
        t = stack.pop()
        if id(t) not in nodes:
            nodes[id(t)] = t
            inside = _torch.get_unwrapped(t) if _torch.is_wrapped(t) else None
            found = (inside, _torch.view_base(t), tangent_of(t))
            parts[id(t)] = [part for part in found if part is not None]
            stack += parts[id(t)]
    edges = Counter(id(part) for those in parts.values() for part in those)
    memory = {
        key: _torch.storage_key(t)
        for key, t in nodes.items()
        if not _torch.is_wrapped(t) and has_memory(t)
    }
    count = Counter(memory.values())
    held = {
        storage
        for storage, n in count.items()
        if _torch.storage_use_count(storage) > n + 1 + held_by_the_engine(storage)
    }

    def reached(those: Iterable[Tensor]) -> set[int]:
        stack, seen = [*those], set[int]()
        while stack:
            t = stack.pop()
            if id(t) not in seen:
                seen.add(id(t))
                stack += parts[id(t)]
        return {memory[key] for key in seen if key in memory}

    # Beside what holds them here, and `nodes`.
    others = [t for key, t in nodes.items() if _torch.use_count(t) > edges[key] + 1]
    return [reached([t]) for t in results], held | reached(others)


def tangent_of(t: Tensor) -> Tensor | None:
    """The tangent of ``t`` at its own level."""
    wrapped = _torch.is_wrapped(t)
    if t.is_inference() or (wrapped and not _torch.is_grad_wrapper(t)):
        return None
    if wrapped and _torch.unwrap_if_dead(t) is not t:
        return None  # of a level that has ended
    with at_level(_torch.wrapper_level(t) if wrapped else 0):
        return unpack(t)[1]
