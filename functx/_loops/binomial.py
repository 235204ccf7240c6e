"""Where a loop is cut: which of its states are kept, and how often its steps run again.

A loop of ``n`` steps is a chain of regions, each a loop again, and a last step that is in none. A
region keeps its first state. Pulled back, the last region of the chain is run again first; by then
the states after its own are free, so that its own chain may keep as many, and so on inwards:

    loop(n, slots) = region(loop(m, slots)), then loop(n - m, slots - 1)

A step runs again once for each region around it. *Slots* counts the states that are ever kept at
once, the first one of the loop included; the state that the step under the pullback starts from is
part of that step's residuals.

Source:
    Griewank, *Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
    differentiation*, Optimization Methods and Software 1, 1992; Griewank and Walther, *Algorithm
    799: revolve*, ACM TOMS 26(1), 2000.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

# A region inside a region is a dozen Python frames, and Python allows a thousand.
DEEPEST = 30


def reach(slots: int, depth: int) -> int:
    """The most steps that ``slots`` states serve if no step is in more than ``depth`` regions."""
    return math.comb(slots + depth, slots) if slots >= 0 and depth >= 0 else 0


def depth(steps: int, slots: int) -> int:
    """The most regions around one step, in the best schedule."""
    found = 0
    while reach(slots, found) < steps:
        found += 1
    return found


def default_slots(steps: int) -> int:
    """A number of slots that grows with the logarithm."""
    return max(1, (steps - 1).bit_length())


def least_slots(steps: int) -> int:
    """The fewest slots with which no step is in more than `DEEPEST` regions."""
    slots = 1
    while reach(slots, DEEPEST) < steps:
        slots += 1
    return slots


def chain(steps: int, slots: int) -> Iterator[tuple[int, int]]:
    """The parts of a loop in order: how many steps each has, and its slots; the last is a step."""
    while steps > 1:
        d = depth(steps, slots)
        # Any from max(reach(slots, d - 2), steps - reach(slots - 1, d)) up to this is as good.
        m = min(reach(slots, d - 1), steps - reach(slots - 1, d - 1))
        yield m, slots
        steps, slots = steps - m, slots - 1
    yield steps, slots


def segments(length: int, count: int) -> list[tuple[int, int]]:
    """Cut ``length`` things into ``count`` runs whose lengths differ by one at most, longer first.

    Returns:
        Start and end of each.

    Example:
        >>> segments(7, 3)
        [(0, 3), (3, 5), (5, 7)]
    """
    short, longer = divmod(length, count)
    ends = [short * i + min(i, longer) for i in range(count + 1)]
    return list(itertools.pairwise(ends))
