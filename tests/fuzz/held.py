"""Which results of operations are held when the forward has run: by tapes, nodes, Python.

A region holds nothing that it made, results aside; with a policy that keeps all it may, it holds
what its tape would hold. So of what regions make, beside what is held without `remat`, only that
may be held which other regions, or the code around, read: it may be the input of a region.

What a region keeps is kept for all of its results, as long as one of them is there: nobody knows
when it has run which of them will be dropped. (A primal and its tangent are two.) So where a region
that keeps all it may has several, or one in it does, what their tapes hold then may stay. So may
what a value was computed from that Python reads, which runs again in a replay, and which may write
there: such a value is not kept itself. And where Python is on a tape, all inputs count as read; in
forward mode, those that have tangents.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from functx import _torch
from functx._remat._tangents import tangent_of

# Operations that the engine never runs by itself, and whose results tapes seldom hold.
_NOTED = {
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.sub.Tensor,
    torch.ops.aten.sin.default,
    torch.ops.aten.cos.default,
}
_READS = {torch.Tensor.numpy, torch.Tensor.tolist}


class Held:
    """Notes operations while the forward runs.

    Attributes:
        place: the region that is running, of those that are around each other the innermost.
        shared: numbers of results that no region made, that were read elsewhere, that the tape of
            several results held, or that a replay needs for what Python reads.
    """

    _keeps = False  # whether the outermost region that is running keeps all that it may

    def __init__(self) -> None:
        self.place: tuple[int, ...] = ()
        self.shared: set[Any] = set()
        self._made: dict[int, tuple[Any, StorageWeakRef, tuple[int, ...]]] = {}
        self._counts: Counter[Any] = Counter()
        self._from: dict[int, set[Any]] = {}  # what was computed from which of these

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation ran."""
        read, memory = set(), set()
        for t in pytree.tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor) and (storage := _storage(t)) is not None:
                memory.add(storage._cdata)
                found = self._made.get(storage._cdata)
                if found is not None and not found[1].expired():
                    read.add(found[0])
                    if found[2] != self.place:
                        self.shared.add(found[0])
        storage = _storage(out) if isinstance(out, torch.Tensor) else None
        if storage is not None and storage._cdata not in memory:
            self._from[storage._cdata] = read
        if func in _NOTED and storage is not None:
            self._counts[func] += 1
            number = func, self._counts[func]
            if not self.place:
                self.shared.add(number)
            self._made[storage._cdata] = number, StorageWeakRef(storage), self.place

    def begins(self, number: int, keeps: bool) -> None:
        """A region begins to run, and keeps all it may, or not."""
        if not self.place:
            self._keeps = keeps
        self.place = (*self.place, number)

    def given(self, arguments: Any) -> None:
        """The region that begins is given this, and may keep it though it does not read it."""
        parts = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
        for t in parts:  # which grows
            if (tangent := tangent_of(t)) is not None:
                parts.append(tangent)
            if _torch.is_wrapped(t):
                parts.append(_torch.get_unwrapped(t))
            elif (storage := _storage(t)) is not None:
                found = self._made.get(storage._cdata)
                if found is not None and not found[1].expired():
                    self.shared.add(found[0])

    def ended(self, several: bool) -> None:
        """The innermost region has run, and has several results, or not."""
        if several and self._keeps:
            n = len(self.place)
            for number, memory, place in self._made.values():
                if place[:n] == self.place and not memory.expired():
                    self.shared.add(number)
        self.place = self.place[:-1]

    def read_by_python(self, t: torch.Tensor) -> None:
        """Python reads a value."""
        if self._keeps and (storage := _storage(t)) is not None:
            self.shared |= self._from.get(storage._cdata, set())

    def alive(self) -> tuple[set[Any], Counter[Any]]:
        """Numbers of the results that are held, and how often each operation ran."""
        held = {number for number, memory, _ in self._made.values() if not memory.expired()}
        return held, self._counts.copy()


class Reads(TorchFunctionMode):
    """Tells which values Python reads."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held = held

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._held.read_by_python(args[0])
        return func(*args, **(kwargs or {}))


def _storage(t: torch.Tensor) -> Any:
    try:
        return None if t._is_zerotensor() else t.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
