"""Schedules against a dynamic programme that knows nothing of binomials."""

import functools
import itertools
import math

import pytest

from functx import _schedules


@functools.cache
def optimum(steps, slots):
    """The fewest steps run again: try every place for the next state that is kept."""
    if steps <= 1:
        return 0
    if slots == 0:
        return math.inf
    return min(m + optimum(m, slots) + optimum(steps - m, slots - 1) for m in range(1, steps))


def walk(steps, slots):
    """Steps run again, and the most regions around one step, of a schedule as it is executed."""
    *regions, last = _schedules.chain(steps, slots)
    assert last[0] == 1
    assert sum(m for m, _ in regions) == steps - 1
    again = deepest = 0
    for m, own in regions:
        assert own >= 1  # a region's first state is one of its slots
        inside, depth = walk(m, own)
        again, deepest = again + m + inside, max(deepest, depth + 1)
    return again, deepest


@pytest.mark.parametrize("slots", range(1, 9))
def test_binomial_is_the_optimum(slots):
    for steps in range(1, 100):
        best = _schedules.recomputed(steps, slots)
        assert best == optimum(steps, slots)
        depth = _schedules.depth(steps, slots)
        assert walk(steps, slots) == (best, depth)


def test_a_thousand_steps():
    assert _schedules.recomputed(1024, 10) == 3755
    assert walk(1024, 10) == (3755, 5)


def test_least_slots_bound_the_depth():
    for steps in (1, 31, 32, 496, 497, 1024, 10**6):
        slots = _schedules.least_slots(steps)
        assert _schedules.depth(steps, slots) <= _schedules.DEEPEST
        assert slots == 1 or _schedules.depth(steps, slots - 1) > _schedules.DEEPEST


def test_segments():
    for length in range(1, 20):
        for count in range(1, length + 1):
            cuts = _schedules.segments(length, count)
            sizes = [b - a for a, b in cuts]
            assert len(cuts) == count
            assert (cuts[0][0], cuts[-1][1]) == (0, length)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
