"""Who holds a tensor: whether a tape has come to hold what the engine itself holds.

NOTE [alive]
A saved tensor may be the tensor itself, an alias that shares its storage, or a wrapper of some
transform around it. So what counts is storages, by weak references, and, for tensors that the
engine itself holds (results and inputs), how many more holders each has than it should. Aliases
that the engine holds of what a policy may keep are counted by memory, and never taken for a tape's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence, Set

from torch import Tensor

from functx import _torch
from functx._torch import is_wrapped, storage_use_count, use_count
from functx._torch_memory import key_of_storage


class _Own(threading.local):
    def __init__(self) -> None:
        self.holds: list[Counter[int]] = []


_own = _Own()


def holding(counts: Counter[int]) -> None:
    """From here to `not_holding`, ``counts`` says how many aliases the engine holds, by memory."""
    _own.holds.append(counts)


def not_holding(counts: Counter[int]) -> None:
    """These aliases are gone, or are a tape's now."""
    _own.holds = [c for c in _own.holds if c is not counts]


def engine_holds() -> bool:
    """Whether the engine holds aliases of any memory."""
    return bool(_own.holds)


def held_by_the_engine(storage: int) -> int:
    """How many aliases of some memory the engine holds. ``NOTE [alive]``."""
    holds = _own.holds
    return sum(counts[storage] for counts in holds) if holds else 0


class Holders:
    """How many holders a tensor has, at every level of its wrappers. ``NOTE [alive]``.

    Args:
        t: the tensor.
        owner: what it stands for, which holds the same memory.

    Attributes:
        storage: the key of its memory.
        shared: whether others hold that. They may let go of it any time (garbage is collected),
            and then the number does not tell that a tape has come to hold a view.
        tensor: it itself.
    """

    __slots__ = ("_before", "shared", "storage", "tensor")

    def __init__(self, t: Tensor, owner: Tensor | None = None) -> None:
        self.tensor = t
        self.shared = False
        self.storage: int | None
        try:
            if _own.holds or is_wrapped(t):
                self._before, self.storage = _holders(t)
            else:
                self.storage = storage = key_of_storage(t.untyped_storage())
                self._before = [use_count(t), storage_use_count(storage)]
        except (RuntimeError, NotImplementedError):  # no storage to look at: sparse, opaque, ...
            self.storage = None
            return
        uses = self._before[-1]  # one is this very look at it
        if owner is not None and uses > 2 and (uses > 3 or t is owner or is_wrapped(owner)):
            self.shared = uses - 1 > _known(t, owner)  # which knows two that are not the same

    def grown(self, accumulators: Set[int]) -> bool:
        """Whether anything but the tape's leaf nodes has come to hold the tensor since.

        Args:
            accumulators: ids of leaf tensors that have a node that accumulates their gradient,
                which holds the leaf.
        """
        if self.storage is None:
            return True
        t, before = self.tensor, self._before
        if len(before) == 2 and not _own.holds:  # no wrapper
            now = [use_count(t), storage_use_count(key_of_storage(t.untyped_storage()))]
        else:
            now, _ = _holders(t)
        if now == before:
            return False
        if now[-1] > before[-1]:
            return True
        if len(now) == 2:  # no wrapper
            return now[0] - before[0] > (id(t) in accumulators)
        for count, was in zip(now[:-1], before):
            if count - was > (id(t) in accumulators):
                return True
            if _torch.is_wrapped(t):
                t = _torch.get_unwrapped(t)
        return False


def _known(t: Tensor, owner: Tensor) -> int:
    """How many tensors over the memory of ``t`` are known to stay: it, its owner, their bases."""
    found: list[Tensor] = []
    for each in (base_of(t), base_of(owner)):
        for tensor in (each, _torch.view_base(each)):
            if tensor is not None and not any(tensor is other for other in found):
                found.append(tensor)
    return len(found)


def _holders(t: Tensor) -> tuple[list[int], int]:
    """How many hold a tensor, each that it wraps, and its memory; and the key of that."""
    uses = use_count(t)
    if not is_wrapped(t):
        storage = key_of_storage(t.untyped_storage())
        own = held_by_the_engine(storage) if _own.holds else 0
        return [uses, storage_use_count(storage) - own], storage
    counts = [uses]
    while _torch.is_wrapped(t):
        t = _torch.get_unwrapped(t)
        counts.append(_torch.use_count(t))
    storage = _torch.storage_key(t)
    counts.append(_torch.storage_use_count(storage) - held_by_the_engine(storage))
    return counts, storage


def trust_no_twins(holders: Iterable[Holders]) -> None:
    """Where several tensors that a body was given are one inside, a tape may hold each of them.

    What was counted when one of them was met may have been the tape that holds it by another one,
    or a region inside, and have gone since.
    """
    met: dict[int, list[Holders]] = {}
    for holder in holders:
        met.setdefault(id(base_of(holder.tensor)), []).append(holder)
    for twins in met.values():
        if len(twins) > 1:
            for holder in twins:
                holder.storage = None  # so nothing is told of it


def base_of(t: Tensor) -> Tensor:
    """The plain tensor inside all wrappers."""
    while _torch.is_wrapped(t):
        t = _torch.get_unwrapped(t)
    return t


def held_by_a_tape(results: Sequence[Tensor]) -> bool:
    """Whether results of the body over the same memory are held by anything but Python, once each.

    A wrapper holds what it wraps, and a view what it is a view of: the result of a linear layer is
    a view of a product, and those of `chunk` are views of one tensor. Those are no tape's.
    """
    t = results[0]
    if len(results) == 1 and not _torch.is_wrapped(t) and _torch.view_base(t) is None:
        storage = _torch.storage_key(t)
        own = held_by_the_engine(storage)
        return _torch.use_count(t) > 1 or _torch.storage_use_count(storage) > 2 + own  # as below
    edges, found, stack = {id(r): 0 for r in results}, [*results], [*results]
    while stack:
        held = stack.pop()
        inside = _torch.get_unwrapped(held) if _torch.is_wrapped(held) else None
        for other in (inside, _torch.view_base(held)):
            if other is not None:
                if id(other) not in edges:
                    found.append(other)
                    stack.append(other)
                edges[id(other)] = edges.get(id(other), 0) + 1
    plain = 0
    for held in found:
        if _torch.use_count(held) > edges[id(held)] + 1:  # Python, which looks at it
            return True
        plain += not _torch.is_wrapped(held)
    # The tensors, and this very look at their storage.
    storage = _torch.storage_key(base_of(t))
    return bool(_torch.storage_use_count(storage) > plain + 1 + held_by_the_engine(storage))
