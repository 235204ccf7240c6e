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

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Tree = Sequence[Any]
"""Blocks by number; a tuple or list in it is a region."""

# Points of a frontier that are kept: more than stretches of up to ten blocks have.
FINEST = 120


class BlockCosts(NamedTuple):
    """What one block costs; sizes in bytes."""

    kept: int  # of what it makes, live when it has run forward on a tape
    saved: int  # of that, all but results that its own tape does not hold
    passing: int  # most live beside, while it runs forward or is pulled back
    gradients: int  # of its parameters, live from then on
    work: int  # of its forward, in FLOPs; an element of anything but a product counts as one


class Point(NamedTuple):
    """A way to run a stretch."""

    memory: int  # that it needs, in bytes, beside what went into it
    work: int  # done again, in FLOPs
    tree: tuple[Any, ...]  # how


def frontier(blocks: Sequence[BlockCosts], leaving: Sequence[Sequence[int]]) -> list[Point]:
    """Ways to run a chain, by memory, each with less work than the one before.

    ``leaving[i][j]`` is the bytes of the values made by blocks ``i`` to ``j - 1`` that later blocks
    read, or that are results.
    """
    n = len(blocks)
    work_before = [0, *itertools.accumulate(block.work for block in blocks)]
    # Gradients of later blocks, and the cotangents of the results, which the caller holds.
    later = [sum(b.gradients for b in blocks[i:]) + leaving[0][n] for i in range(n)] + [0]
    solved = {(i, i): [Point(0, 0, ())] for i in range(n + 1)}
    for length in range(1, n + 1):
        for start in range(n - length + 1):
            end = start + length
            block = blocks[start]
            # What leaves a region is counted where the region is, and so are its cotangents.
            alone = end == start + 1 < n
            kept = block.saved if alone else block.kept
            passing = block.passing - (leaving[start][end] if alone else 0)
            least = block.saved + passing + later[start + 1]
            found = [
                Point(max(least, kept + p.memory), p.work, (start, *p.tree))
                for p in solved[start + 1, end]
            ]
            # All of it in one region would be pulled back at once: as much memory, and more work.
            for cut in range(start + 1, end):
                again = work_before[cut] - work_before[start]
                inside, rest = solved[start, cut], solved[cut, end]
                found += _region_first(inside, rest, leaving[start][cut], again)
            solved[start, end] = _useful(found)
    return solved[0, n]


def _region_first(inside: list[Point], rest: list[Point], out: int, again: int) -> list[Point]:
    """A region, then the rest: for each amount of memory, the least work of either."""
    found = []
    i = j = 0
    while True:
        # What leaves the region is there for the rest; its cotangents while it is pulled back.
        memory = out + max(inside[i].memory, rest[j].memory)
        work = again + inside[i].work + rest[j].work
        found.append(Point(memory, work, (inside[i].tree, *rest[j].tree)))
        next_inside = inside[i + 1].memory if i + 1 < len(inside) else math.inf
        next_rest = rest[j + 1].memory if j + 1 < len(rest) else math.inf
        if next_inside == next_rest == math.inf:
            return found
        if next_inside <= next_rest:
            i += 1
        else:
            j += 1


def _useful(points: list[Point]) -> list[Point]:
    """Those that no other beats in memory and work; of many some, evenly by memory."""
    useful: list[Point] = []
    for point in sorted(points, key=lambda p: (p.memory, p.work)):
        if not useful or point.work < useful[-1].work:
            useful.append(point)
    if len(useful) <= FINEST:
        return useful
    low, high = useful[0].memory, useful[-1].memory
    kept: dict[int, Point] = {}  # by interval, the one with the least memory; the last is alone
    for point in useful:
        kept.setdefault((point.memory - low) * (FINEST - 1) // (high - low), point)
    return [*kept.values()]


def numbers_in(tree: Iterable[Any]) -> list[Any]:
    """The blocks of a tree."""
    return [n for p in tree for n in (numbers_in(p) if isinstance(p, (list, tuple)) else [p])]


def work_again(tree: Tree, work: Sequence[int], around: int = 0) -> int:
    """The work that the regions of a tree do again."""
    return sum(
        around * work[part] if isinstance(part, int) else work_again(part, work, around + 1)
        for part in tree
    )
