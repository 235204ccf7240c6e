"""An exact dynamic program that chooses which blocks of a chain to recompute.

A chain of blocks is cut into a tree of regions. A block outside all regions saves its residuals. A
region saves its inputs. When it is pulled back, its blocks run forward once more, as a chain
which may have regions again. For each stretch of consecutive blocks, the program finds the Pareto
front of memory and repeated work, from the fronts of shorter stretches:

    the first block outside regions: its residuals, then the rest
    the first k blocks as a region: its outputs, then the rest; later the k blocks again, as a chain

What could be improved: the time grows with the cube of the number of blocks. Fronts with many
points are thinned out (`FINEST`), and then the result may not be the best.

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
"""Block numbers; a tuple or list in it is a region."""

# The most points of a front that are used. Stretches of up to ten blocks have fewer.
FINEST = 120


class BlockCosts(NamedTuple):
    """The cost of one block; sizes in bytes."""

    saved: int  # bytes on its tape
    backward: int  # most bytes live while it is pulled back, with its tape and all gradients
    work: int  # FLOPs of its forward; operations other than products count one per element


@dataclass
class Handed:
    """A storage that crosses boundaries between blocks.

    Boundary ``i`` is in front of block ``i``.
    """

    storage: weakref.ref[Any]
    nbytes: int
    made: int  # the first boundary that it crosses: block `made - 1` made it, 0 for an input
    # The first block that has it on its tape; the number of blocks if none has. -1 if something
    # other than tapes keeps it alive.
    kept: int = -1


class Point(NamedTuple):
    """A way to run a stretch of blocks."""

    memory: int  # bytes that it needs in addition to what blocks before it have saved
    work: int  # FLOPs that it repeats
    tree: tuple[Any, ...]  # its regions


def frontier(blocks: Sequence[BlockCosts], states: Sequence[Sequence[Handed]]) -> list[Point]:
    """The Pareto front of ways to run a chain: more memory and less repeated work along the list.

    Args:
        blocks: the cost of each block.
        states: the storages that cross each boundary. The last entry is the chain's result, which
            is not counted.
    """
    n = len(blocks)

    @functools.cache
    def made(i: int, j: int, kept: bool = False) -> int:
        """Bytes that blocks i to j - 1 make and block j takes; with ``kept``, if on their tapes."""
        return sum(h.nbytes for h in states[j] if h.made > i and not (kept and h.kept >= j))

    @functools.cache
    def unsaved(i: int, j: int) -> int:
        """Bytes that block i takes and that no block before j has on its tape."""
        return sum(h.nbytes for h in states[i] if h.kept >= j)

    work_before = [0, *itertools.accumulate(block.work for block in blocks)]
    solved = {(i, i): [Point(0, 0, ())] for i in range(n + 1)}
    for length in range(1, n + 1):
        for start in range(n - length + 1):
            end, block = start + length, blocks[start]
            # The pullback of a region holds the cotangents of its outputs until it ends.
            least = block.backward + made(start + 1, end)
            found = [
                Point(max(least, block.saved + p.memory), p.work, (start, *p.tree))
                for p in solved[start + 1, end]
            ]
            # The whole stretch as one region is not tried: it would need as much memory as the same
            # chain without that region, and more work.
            for cut in range(start + 1, end):
                # While the region is pulled back, its inputs are live, and the cotangents that the
                # pullback around it got for values made after the region. While the rest runs, the
                # inputs and outputs of the region are live; outputs on tapes of the rest are
                # counted there.
                with_region = unsaved(start, cut) + made(cut, end)
                with_rest = unsaved(start, start) + made(start, cut, kept=True)
                inside = [(with_region + p.memory, 0, p) for p in solved[start, cut]]
                rest = [(with_rest + p.memory, 1, p) for p in solved[cut, end]]
                again = work_before[cut] - work_before[start]
                # In order of memory, combine the cheapest way to run each part that fits so far.
                best: list[Any] = [None, None]
                for memory, which, point in sorted(inside + rest):
                    best[which] = point
                    if None not in best:
                        first, then = best
                        work = again + first.work + then.work
                        found.append(Point(memory, work, (first.tree, *then.tree)))
            solved[start, end] = _useful(found)
    return solved[0, n]


def _useful(points: list[Point]) -> list[Point]:
    """The points that no other beats in memory and work; if many, some of them, even in memory."""
    useful: list[Point] = []
    for point in sorted(points, key=lambda p: (p.memory, p.work)):
        if not useful or point.work < useful[-1].work:
            useful.append(point)
    low, high = useful[0].memory, useful[-1].memory
    step = (high - low) // FINEST + 1 if len(useful) > FINEST else 1
    return [*{(p.memory - low + step - 1) // step: p for p in useful}.values()]


def numbers_in(tree: Iterable[Any]) -> list[Any]:
    """The numbers of the blocks in a tree."""
    return [n for p in tree for n in (numbers_in(p) if isinstance(p, (list, tuple)) else [p])]


def work_again(tree: Tree, work: Sequence[int], around: int = 0) -> int:
    """The work that the regions of a tree repeat."""
    return sum(
        around * work[part] if isinstance(part, int) else work_again(part, work, around + 1)
        for part in tree
    )
