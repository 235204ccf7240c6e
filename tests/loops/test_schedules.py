"""Schedules against a dynamic programme that knows nothing of binomials."""

import functools
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
def test_binomial_schedules_are_the_optimum(slots):
    for steps in range(1, 100):
        best = _schedules.recomputed(steps, slots)
        assert best == optimum(steps, slots)
        depth = _schedules.depth(steps, slots)
        assert walk(steps, slots) == (best, depth)


def test_a_thousand_steps_in_ten_slots_run_3755_again():
    assert _schedules.recomputed(1024, 10) == 3755
    assert walk(1024, 10) == (3755, 5)


def test_the_least_slots_bound_the_depth():
    for steps in (1, 31, 32, 496, 497, 1024, 10**6):
        slots = _schedules.least_slots(steps)
        assert _schedules.depth(steps, slots) <= _schedules.DEEPEST
        assert slots == 1 or _schedules.depth(steps, slots - 1) > _schedules.DEEPEST
