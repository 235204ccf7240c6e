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

    Results are given as the body's, and as what they are made of at the lowest level.
    """
    alive = set(filter(record.has_made, record.made))
    family = [*{id(t): t for t in (*results, *kept)}.values()]
    holders = dict.fromkeys(map(id, family), 0)  # by id: how many of the family hold it
    for t in family:  # which grows
        held = [t._base] if t._is_view() and t._base is not None else []
        if _torch.level_of(t) > 0:
            held.append(_torch.inner_of(t))
        for inside in held:
            if id(inside) not in holders:
                family.append(inside)
            holders[id(inside)] = holders.get(id(inside), 0) + 1
    users: dict[int, int] = {}
    on_tape = {-1}
    for t in family:
        storage = storage_of(levels.base_of(t))
        if _torch.level_of(t) <= 0:
            users[storage] = users.get(storage, 1) + 1  # one is the storage's Python object
        if t._use_count() > 1 + holders[id(t)]:  # type: ignore[attr-defined]
            on_tape.add(storage)
    for storage, n in users.items():
        if storage not in on_tape and _torch.storage_use_count(storage) <= n:
            alive.discard(storage)
    return alive
