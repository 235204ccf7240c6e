"""Which steps of a record must run, so that some of their results come about."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from functx._remat._saving import key_of
from functx._remat._step import Step


def needed(
    steps: Sequence[Step],
    live: Iterable[int],
    kept: Collection[int] = (),
    *,
    draws: bool = True,
    drawn: bool = False,
) -> tuple[list[bool], set[int]]:
    """Which steps must run for some results, and which kept results are handed out.

    A later draw must find the generator where it was, and so must a region inside.

    Args:
        steps: what ran, in order.
        live: keys of the results.
        kept: keys of the results that need no step to run.
        draws: whether generators matter.
        drawn: whether something that is no step finds the generators as the steps leave them.
    """
    runs = [False] * len(steps)
    if not kept:  # then it does not matter which results of a step are needed
        for key in live:
            runs[key >> 6] = True
        for number in range(len(steps) - 1, -1, -1):
            step = steps[number]
            read = runs[number]
            if step.kind.draws:
                must = draws and (drawn or (step.layouts is None and not step.writes))
                runs[number] = runs[number] or must
                drawn = drawn or runs[number]
                read = read or (must and not step.kind.draws_blindly)
            if read:
                for key in step.reads:
                    runs[key >> 6] = True
        return runs, set()
    masks = [0] * len(steps)  # which results of a step are needed
    for key in live:
        masks[key >> 6] |= 1 << (key & 63)
    stops: dict[int, int] = {}
    for key in kept:
        stops[key >> 6] = stops.get(key >> 6, 0) | 1 << (key & 63)
    given: set[int] = set()
    for number in range(len(steps) - 1, -1, -1):
        step, mask = steps[number], masks[number]
        must = False
        if step.kind.draws:
            must = draws and (drawn or (step.layouts is None and not step.writes))
        if mask and not must and stops and not mask & ~stops.get(number, 0):
            given |= {key_of(number, i) for i in range(64) if mask >> i & 1}
        elif mask or must:
            runs[number] = True
            drawn = drawn or step.kind.draws
            if mask or not step.kind.draws_blindly:
                for key in step.reads:
                    masks[key >> 6] |= 1 << (key & 63)
    return runs, given


def with_siblings(steps: Sequence[Step], live: Sequence[bool], numbers: Iterable[int]) -> set[int]:
    """Steps, what they read from, and what is part of the same. ``NOTE [siblings]``.

    Args:
        steps: what ran, in order.
        live: which of them some result needs.
        numbers: where to begin.
    """
    siblings: dict[Any, list[int]] = {}
    for number, step in enumerate(steps):
        if live[number]:
            siblings.setdefault(step.part_of, []).append(number)
    stack = list(numbers)
    closed: set[int] = set()
    while stack:
        number = stack.pop()
        if number not in closed:
            closed.add(number)
            step = steps[number]
            stack += [key >> 6 for key in step.reads]
            stack += siblings.pop(step.part_of, ())
    return closed
