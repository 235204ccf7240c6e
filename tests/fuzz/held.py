"""Which results of operations are held when the forward has run: by tapes, nodes, Python.

A region holds nothing that it made, results aside; with a policy that keeps all it may, it holds
what its tape would hold. So of what regions make, beside what is held without `remat`, only that
may be held which other regions, or the code around, read: it may be the input of a region.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

# Operations that the engine never runs by itself, and whose results tapes seldom hold.
_NOTED = {
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.sin.default,
    torch.ops.aten.cos.default,
}


class Held:
    """Notes operations while the forward runs.

    Attributes:
        place: the region that is running, of those that are around each other the innermost.
        shared: numbers of results that no region made, or that were read elsewhere.
    """

    def __init__(self) -> None:
        self.place: tuple[int, ...] = ()
        self.shared: set[Any] = set()
        self._made: dict[int, tuple[Any, StorageWeakRef, tuple[int, ...]]] = {}
        self._counts: Counter[Any] = Counter()

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation ran."""
        for t in pytree.tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor) and (storage := _storage(t)) is not None:
                found = self._made.get(storage._cdata)
                if found is not None and not found[1].expired() and found[2] != self.place:
                    self.shared.add(found[0])
        if func in _NOTED and (storage := _storage(out)) is not None:
            self._counts[func] += 1
            number = func, self._counts[func]
            if not self.place:
                self.shared.add(number)
            self._made[storage._cdata] = number, StorageWeakRef(storage), self.place

    def alive(self) -> tuple[set[Any], Counter[Any]]:
        """Numbers of the results that are held, and how often each operation ran."""
        held = {number for number, memory, _ in self._made.values() if not memory.expired()}
        return held, self._counts.copy()


def _storage(t: torch.Tensor) -> Any:
    try:
        return None if t._is_zerotensor() else t.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
