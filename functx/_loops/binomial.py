"""Decide where a loop is cut: which of its states are saved, and how often its steps run again.

A loop of ``n`` steps is a chain of regions, each of which is a loop again, followed by a last step
outside all regions. A region saves its first state. In the backward pass the last region of the
chain runs again first. The states after its own have been freed at that moment, so the chain inside
the region may save as many states. The same holds for the regions inside it:

    loop(n, slots) = region(loop(m, slots)), then loop(n - m, slots - 1)

A step runs again once for each region around it. *Slots* is the most states that are saved at once,
including the first state of the loop. The state from which the current step of the backward pass
starts does not count; it is one of that step's residuals.

Source:
    Griewank, *Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
    differentiation*, Optimization Methods and Software 1, 1992; Griewank and Walther, *Algorithm
    799: revolve*, ACM TOMS 26(1), 2000.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

# Each nested region takes about a dozen Python frames, and Python allows a thousand.
DEEPEST = 30


def reach(slots: int, depth: int) -> int:
    """The most steps for ``slots`` saved states if no step is in more than ``depth`` regions."""
    return math.comb(slots + depth, slots) if slots >= 0 and depth >= 0 else 0


def depth(steps: int, slots: int) -> int:
    """The most regions around one step, in the best schedule."""
    found = 0
    while reach(slots, found) < steps:
        found += 1
    return found


def default_slots(steps: int) -> int:
    """The default number of slots: the binary digits of ``steps - 1``."""
    return max(1, (steps - 1).bit_length())


def least_slots(steps: int) -> int:
    """The fewest slots with which no step is in more than `DEEPEST` regions."""
    slots = 1
    while reach(slots, DEEPEST) < steps:
        slots += 1
    return slots


def chain(steps: int, slots: int) -> Iterator[tuple[int, int]]:
    """The parts of a loop in order, each as its steps and its slots. The last part is one step."""
    while steps > 1:
        d = depth(steps, slots)
        # Any number from max(reach(slots, d - 2), steps - reach(slots - 1, d)) to this is optimal.
        m = min(reach(slots, d - 1), steps - reach(slots - 1, d - 1))
        yield m, slots
        steps, slots = steps - m, slots - 1
    yield steps, slots


def segments(length: int, count: int) -> list[tuple[int, int]]:
    """Cut ``length`` items into ``count`` runs, whose lengths differ by at most one, longer first.

    Returns:
        The start and the end of each run.

    Example:
        >>> segments(7, 3)
        [(0, 3), (3, 5), (5, 7)]
    """
    short, longer = divmod(length, count)
    ends = [short * i + min(i, longer) for i in range(count + 1)]
    return list(itertools.pairwise(ends))
