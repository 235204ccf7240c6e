"""Which memory the tape of a region reads: all that is alive, but what only its results hold.

Who holds a tensor is counted exactly: its Python object, the wrappers around it, the views of it;
and who holds a storage, tensors and the storage's own Python object. What somebody else holds too,
is on the tape.
"""

from __future__ import annotations

from torch import Tensor

from functx import _torch
from functx._remat import levels
from functx._remat.ledger import Record
from functx._remat.operators import storage_of


def needed(record: Record, results: list[Tensor], kept: list[Tensor]) -> set[int]:
    """The memory made by the region that its tape reads.

    Args:
        record: the region's.
        results: the body's, and what they are made of at the lowest level that differentiates.
        kept: what a policy keeps.
    """
    alive = record.alive()
    ours = [*results, *kept]
    if not alive or not ours:
        return alive
    holders: dict[int, tuple[Tensor, int]] = {}  # by id: how many of the family hold it
    todo = [(t, 0) for t in {id(t): t for t in ours}.values()]
    while todo:
        t, n = todo.pop()
        seen = holders.get(id(t))
        if seen is not None:
            holders[id(t)] = t, seen[1] + n
            continue
        holders[id(t)] = t, n
        if t._is_view() and t._base is not None:
            todo.append((t._base, 1))
        if _torch.level_of(t) > 0:
            todo.append((_torch.inner_of(t), 1))
    del todo
    held: dict[int, int] = {}
    on_tape = set()
    for t, n in holders.values():
        storage = storage_of(levels.base_of(t))
        if _torch.level_of(t) <= 0:
            held[storage] = held.get(storage, 1) + 1  # one is the storage's Python object
        if t._use_count() > 1 + n:
            on_tape.add(storage)
    for storage, n in held.items():
        if storage == -1 or storage in on_tape:
            continue
        if _torch.storage_use_count(storage) <= n:
            alive.discard(storage)
    return alive
