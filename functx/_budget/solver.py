"""Which blocks of a chain to recompute so that a pullback fits: an exact dynamic programme.

A chain of blocks is cut into a tree of regions. A block outside of all regions keeps what its
pullback reads; a region keeps what goes into it, runs forward once more when it is pulled back, and
is a chain again then. For each stretch of blocks, the programme finds every useful pair of memory
needed and work done again, none of them better in both, from those of shorter stretches:

    first block kept:   residuals of it, then the rest
    first k in a region: the values that leave it, then the rest; later the k again, as a chain

Source:
    Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, *Optimal checkpointing for heterogeneous
    chains*, ACM TOMS 46(2), 2020; here over all budgets at once, and with the cotangents that
    nested pullbacks hold.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Tree = Sequence[Any]
"""Blocks by number; a tuple or list in it is a region."""

# Points of a frontier that are kept: more than stretches of up to ten blocks have.
FINEST = 120


class BlockCosts(NamedTuple):
    """What one block costs; sizes in bytes."""

    saved: int  # on its tape
    backward: int  # most live while it is pulled back, its tape and all gradients included
    work: int  # of its forward, in FLOPs; an element of anything but a product counts as one


@dataclass
class Handed:
    """Memory that goes from one block to the next."""

    storage: weakref.ref[Any]
    nbytes: int
    made: int  # by the block before this one; 0 if it was there before
    kept: int = -1  # no block before this one has it on its tape; -1 for what is held otherwise


class Point(NamedTuple):
    """A way to run a stretch."""

    memory: int  # that it needs, in bytes, beside what blocks before it have saved
    work: int  # done again, in FLOPs
    tree: tuple[Any, ...]  # how


def frontier(blocks: Sequence[BlockCosts], states: Sequence[Sequence[Handed]]) -> list[Point]:
    """Ways to run a chain, by memory, each with less work than the one before.

    ``states`` are what each block is given; the results come last, and are not counted.
    """
    n = len(blocks)

    @functools.cache
    def made(i: int, j: int, kept: bool = False) -> int:
        """Bytes that block j is given of blocks i to j - 1, or only what they have on tapes."""
        return sum(h.nbytes for h in states[j] if h.made > i and not (kept and h.kept >= j))

    @functools.cache
    def unsaved(i: int, j: int) -> int:
        """Bytes that block i is given, and that no block before j has on its tape."""
        return sum(h.nbytes for h in states[i] if h.kept >= j)

    work_before = [0, *itertools.accumulate(block.work for block in blocks)]
    solved = {(i, i): [Point(0, 0, ())] for i in range(n + 1)}
    for length in range(1, n + 1):
        for start in range(n - length + 1):
            end, block = start + length, blocks[start]
            # A region's pullback holds the cotangents that it is given until it has ended.
            least = block.backward + made(start + 1, end)
            found = [
                Point(max(least, block.saved + p.memory), p.work, (start, *p.tree))
                for p in solved[start + 1, end]
            ]
            # All of it in one region would be pulled back at once: as much memory, and more work.
            for cut in range(start + 1, end):
                # Beside its inside a region has what it is given; the rest, what the region gives.
                beside = unsaved(start, cut) + made(cut, end)
                leaves = unsaved(start, start) + made(start, cut, kept=True)
                inside = [(beside + p.memory, 0, p) for p in solved[start, cut]]
                rest = [(leaves + p.memory, 1, p) for p in solved[cut, end]]
                again = work_before[cut] - work_before[start]
                best: list[Any] = [None, None]  # of each, what needs no more than this memory
                for memory, which, point in sorted(inside + rest):
                    best[which] = point
                    if None not in best:
                        first, then = best
                        work = again + first.work + then.work
                        found.append(Point(memory, work, (first.tree, *then.tree)))
            solved[start, end] = _useful(found)
    return solved[0, n]


def _useful(points: list[Point]) -> list[Point]:
    """Those that no other beats in memory and work; of many some, evenly by memory."""
    useful: list[Point] = []
    for point in sorted(points, key=lambda p: (p.memory, p.work)):
        if not useful or point.work < useful[-1].work:
            useful.append(point)
    low, high = useful[0].memory, useful[-1].memory
    step = (high - low) // FINEST + 1 if len(useful) > FINEST else 1
    return [*{(p.memory - low + step - 1) // step: p for p in useful}.values()]


def numbers_in(tree: Iterable[Any]) -> list[Any]:
    """The blocks of a tree."""
    return [n for p in tree for n in (numbers_in(p) if isinstance(p, (list, tuple)) else [p])]


def work_again(tree: Tree, work: Sequence[int], around: int = 0) -> int:
    """The work that the regions of a tree do again."""
    return sum(
        around * work[part] if isinstance(part, int) else work_again(part, work, around + 1)
        for part in tree
    )
