"""Whether a pullback can run twice with no higher peak: where memory has gone meanwhile.

NOTE [room]
What compares a pullback with an ordinary replay needs its inputs and cotangents for both, so these
can't go when they have been read (``NOTE [let go]``). In a backward pass boundaries go, one after
the other. So a pullback whose peak would be higher is compared where at least as much has gone
since another one of the same pass; and where there never is such a place, it is replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from functx import _torch
from functx._torch_memory import Memories, storage_and_key

_NOTHING = 4096  # bytes


class Needs:
    """What a pullback needs, in bytes beyond those of its inputs and cotangents.

    Attributes:
        once: where these go with their last use, and gradients stay.
        twice: where they stay, and gradients go.
    """

    __slots__ = ("once", "twice")

    def __init__(self, once: int, twice: int) -> None:
        self.once = once
        self.twice = twice


def needs(
    steps: Sequence[Collection[int]],
    sizes: Mapping[int, int],
    held: Collection[int],
    going: Collection[int],
    results: Collection[int],
    looked_at: Sequence[Collection[int]],
    beside: Collection[int],
) -> Needs:
    """What code needs.

    An operation that takes memory beside is taken to need as much as it reads and makes.

    Args:
        steps: for each operation, the memory that it reads, writes to or makes.
        sizes: of pieces of memory.
        held: what is there first, and stays.
        going: what is there first, and can go.
        results: what the gradients are in.
        looked_at: for each operation, which of that is not read later otherwise.
        beside: the operations that may take memory beside that of what they give.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, step in enumerate(steps):
        for memory in step:
            first.setdefault(memory, i)
            last[memory] = i
    once, twice = [0] * (len(steps) + 1), [0] * (len(steps) + 1)
    for memory, size in sizes.items():
        if memory not in first or memory in held:
            continue
        if memory in going:
            once[last[memory] + 1] -= size
            continue
        once[first[memory]] += size
        twice[first[memory]] += size
        if memory not in results:
            once[last[memory] + 1] -= size
        seen = [i for i, those in enumerate(looked_at) if memory in those]
        twice[max(last[memory], *seen, 0) + 1] -= size
    for i in beside:
        size = sum(sizes.get(memory, 0) for memory in {*steps[i]})
        for changes in (once, twice):
            changes[i] += size
            changes[i + 1] -= size
    return Needs(max(accumulate(once)), max(accumulate(twice)))


class _Pass(threading.local):
    """A backward pass, as far as pullbacks go that are not known yet.

    Attributes:
        task: its number.
        top: the most bytes that it has needed so far, beyond those that were live when it began.
    """

    task = -1
    top = 0

    def __init__(self) -> None:
        self._memories = Memories()
        self._sizes: dict[int, tuple[int, bool]] = {}

    def begins(self) -> None:
        """A pullback is going to run."""
        if self.task != (task := _torch.current_graph_task_id()):
            self.task, self.top = task, 0
            self._memories.clear()
            self._sizes = {}

    def level(self) -> int:
        """What came, less what went."""
        alive: Collection[int] = {*self._memories.alive()}
        return sum(
            (key in alive) * size if came else (key in alive) * size - size
            for key, (size, came) in self._sizes.items()
        )

    def knows(self, tensors: Iterable[Tensor], *, came: bool) -> None:
        """What a pullback reads, or what it has given; plain tensors."""
        for t in tensors:
            memory, key = storage_and_key(t)
            if key not in self._sizes:
                self._memories.add(memory, key)
                self._sizes[key] = memory.nbytes(), came


_pass = _Pass()


def begins(given: Iterable[Tensor]) -> int:
    """A pullback that is not known yet begins; at which level."""
    _pass.begins()
    level = _pass.level()
    _pass.knows(given, came=False)
    return level


def ends(gradients: Iterable[Tensor], level: int, needs: Needs | None) -> None:
    """It has ended."""
    if needs is not None:
        _pass.top = max(_pass.top, level + needs.once)
    _pass.knows(gradients, came=True)


def is_there(level: int, needs: Needs) -> bool:
    """Whether a pullback can run twice that has begun at a level."""
    little = max(_NOTHING, needs.once >> 7)
    return needs.twice - needs.once <= little or level + needs.twice <= _pass.top
