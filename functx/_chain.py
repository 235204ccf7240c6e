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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Tree = list[Any]
"""Blocks by number; a list in it is a region."""

# Points of a frontier that are kept: more than stretches of up to ten blocks have.
FINEST = 120


@dataclass(frozen=True)
class Block:
    """What one block costs; sizes in bytes.

    Attributes:
        kept: of what it makes, live when the whole chain has run forward on a tape.
        saved: of that, what its own tape holds.
        forward: most live while it runs forward.
        backward: most live while it is pulled back, beside ``saved``.
        cotangents: of its results, which are part of ``backward``.
        gradients: of its parameters, live from then on.
        work: of its forward, in FLOPs; an element of anything but a product counts as one.
    """

    kept: int
    saved: int
    forward: int
    backward: int
    cotangents: int
    gradients: int
    work: int


@dataclass(frozen=True)
class Point:
    """A way to run a stretch.

    Attributes:
        memory: that it needs, in bytes, beside what went into it.
        work: done again, in FLOPs.
        tree: how.
    """

    memory: int
    work: int
    tree: Any


class Chain:
    """The frontiers of all stretches of a chain.

    Args:
        blocks: what they cost.
        leaving: ``leaving[i][j]``: bytes of the values made by blocks ``i`` to ``j - 1`` that
            later blocks read, or that are results.
        unsaved: bytes of what goes into each block that no tape holds, but a region would.
        finest: points of a frontier to keep.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        leaving: Sequence[Sequence[int]],
        unsaved: Sequence[int] = (),
        finest: int = FINEST,
    ) -> None:
        self._blocks = blocks
        self._unsaved = unsaved or [0] * len(blocks)
        self._finest = finest
        self._leaving = leaving
        n = len(blocks)
        self._later = [0] * (n + 1)  # gradients of later blocks
        self._before = [0] * (n + 1)  # work of earlier blocks
        for i in reversed(range(n)):
            self._later[i] = self._later[i + 1] + blocks[i].gradients
            if i == n - 1:  # and the cotangents of the results, which the caller holds
                self._later[i] += leaving[0][n]
        for i in range(n):
            self._before[i + 1] = self._before[i] + blocks[i].work
        self._frontiers: dict[tuple[int, int], list[Point]] = {}
        for i in range(n + 1):
            self._frontiers[i, i] = [Point(0, 0, ())]
        for length in range(1, n + 1):
            for start in range(n - length + 1):
                self._frontiers[start, start + length] = self._solve(start, start + length)

    @property
    def work(self) -> list[int]:
        """Of the blocks."""
        return [block.work for block in self._blocks]

    def frontier(self) -> list[Point]:
        """Ways to run the chain, by memory, each with less work than the one before."""
        return self._frontiers[0, len(self._blocks)]

    def _solve(self, start: int, end: int) -> list[Point]:
        block = self._blocks[start]
        # What the next block saves of it is not there any more, or not in this stretch.
        alone = end == start + 1 < len(self._blocks)
        # And its cotangents are those that are held for the region.
        backward = block.backward - (block.cotangents if alone else 0)
        least = max(block.forward, block.saved + backward + self._later[start + 1])
        kept = block.saved if alone else block.kept
        found = [
            Point(max(least, kept + p.memory), p.work, (start, p.tree))
            for p in self._frontiers[start + 1, end]
        ]
        # All of it in one region would be pulled back at once: as much memory, and more work.
        for cut in range(start + 1, end):
            again = self._before[cut] - self._before[start]
            out = self._leaving[start][cut]
            inside, rest = self._frontiers[start, cut], self._frontiers[cut, end]
            found += _both(inside, rest, self._unsaved[start], out, again)
        return thinned(nondominated(found), self._finest)


def _both(inside: list[Point], rest: list[Point], held: int, out: int, again: int) -> list[Point]:
    """A region, then the rest: for each amount of memory, the least work of either."""
    found = []
    i = j = 0
    while True:
        # What leaves the region is there for the rest; its cotangents while it is pulled back.
        memory = held + out + max(inside[i].memory, rest[j].memory)
        tree = ([inside[i].tree], rest[j].tree)
        found.append(Point(memory, again + inside[i].work + rest[j].work, tree))
        following = []
        if i + 1 < len(inside):
            following.append((inside[i + 1].memory, 0))
        if j + 1 < len(rest):
            following.append((rest[j + 1].memory, 1))
        if not following:
            return found
        if min(following)[1]:
            j += 1
        else:
            i += 1


def nondominated(points: list[Point]) -> list[Point]:
    """Those for which no other needs as little memory and does as little work."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.memory, p.work)):
        if not kept or point.work < kept[-1].work:
            kept.append(point)
    return kept


def thinned(points: list[Point], most: int) -> list[Point]:
    """Some of the points, with both ends, evenly by memory."""
    if len(points) <= most:
        return points
    low, high = points[0].memory, points[-1].memory
    kept: dict[int, Point] = {}
    for point in points:
        place = (point.memory - low) * (most - 2) // max(high - low, 1)
        kept.setdefault(place, point)  # the one with the least memory of its interval
    return nondominated([*kept.values(), points[-1]])


def tree_of(linked: Any) -> Tree:
    """The tree of a point, as nested lists."""
    tree: Tree = []
    while linked:
        first, linked = linked
        tree.append(tree_of(first[0]) if isinstance(first, list) else first)
    return tree


def work_again(tree: Tree, work: Sequence[int], around: int = 0) -> int:
    """The work that the regions of a tree do again."""
    return sum(
        work_again(part, work, around + 1) if isinstance(part, list) else around * work[part]
        for part in tree
    )
