"""Loops whose length is known only when they have ended.

The loop is one region that keeps its first state; while it runs forward, every step forgets the
tape of the one before. A replay knows the length, and is a chain of regions as `_schedules` has
it. So a backward pass runs all steps once more than the best schedule for that length.

To stay within twice the optimum for short loops too (there, the optimum is to run every step but
the last again), the first step is a region of its own where there are slots enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functx import _schedules, _tree
from functx._errors import RematError, ReplayError
from functx._remat._by_sight import forget, replaying
from functx._remat._function import run
from functx._remat._holders import base_of
from functx._remat._operator import differentiating
from functx._remat._options import Options
from functx._remat._tapes import batched
from functx._remat._tracker import SILENT, tracking
from functx._remat._watch import watching
from functx._torch_edges import requires_grad_anywhere
from functx._validate import describe

# With fewer, a slot less for all the other steps costs more than it saves.
ENOUGH = 4


class Length:
    """What a replay knows of the loop.

    Attributes:
        steps: how many there were.
        masked: whether the examples of a ``vmap`` had different numbers of them.
    """

    __slots__ = ("masked", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.masked = False


def loop(
    advance: Callable[..., tuple[Any, Any]],
    body: Callable[[Any], Any],
    cond: Callable[[Any], Any],
    state: Any,
    most: int | None,
    slots: int | None,
    split: _schedules.Split,
    name: str,
) -> Any:
    """``while cond(state): state = body(state)``, at most ``most`` times.

    Args:
        advance: runs a loop of known length: ``(step, split, name, reverse, carry, xs, steps,
            slots)``.
        body: from state to state.
        cond: whether to go on.
        state: the first.
        most: a bound, if there is one.
        slots: states to keep, if that was said.
        split: how to cut.
        name: of the body.
    """
    taken = 0
    if differentiating() and most != 0 and (slots is None or slots >= ENOUGH):
        first = functools.partial(_first, body, cond, Length())
        state, went_on = run(first, (state,), {}, Options(name=f"the first step of {name}"))
        if not went_on:
            return state
        taken = 1
    whole = functools.partial(
        _whole, advance, body, cond, split, name, most, slots, taken, Length()
    )
    o = Options(name=f"the loop of {name}", prune=False, by_sight=True)
    return run(whole, (state,), {}, o)


def _whole(
    advance: Callable[..., tuple[Any, Any]],
    body: Callable[[Any], Any],
    cond: Callable[[Any], Any],
    split: _schedules.Split,
    name: str,
    most: int | None,
    slots: int | None,
    taken: int,
    length: Length,
    state: Any,
) -> Any:
    """The loop: forward step by step, in a replay as a tree of regions."""
    step = functools.partial(_step, body, cond, length)
    if replaying():
        n = length.steps
        if n == 0:
            return state
        own = _schedules.default_slots(n + taken) if slots is None else slots
        own = max(own - taken, 1)
        return advance(step, split, name, False, state, [], n, own)[0]
    n = 0
    last = None
    if slots is not None and differentiating():
        last = _schedules.most_steps(slots - taken, split)
    while most is None or n + taken < most:
        if n:
            state = forget(state)
        verdict = cond(state)
        if not _goes_on(verdict, length):
            break
        if last is not None and n >= last and _taped(state):
            raise RematError(
                f"remat_loop: {slots} slots serve no more than {n + taken} steps of {name} in a "
                "backward pass, and the loop goes on; give it more slots"
            )
        state = _next(body, verdict, length, state)
        n += 1
    length.steps = n
    return state


def _taped(state: Any) -> bool:
    leaves = _tree.leaves(state)
    return any(isinstance(leaf, Tensor) and requires_grad_anywhere(leaf) for leaf in leaves)


def _first(body: Any, cond: Any, length: Length, state: Any) -> tuple[Any, bool]:
    verdict = cond(state)
    if not _goes_on(verdict, length):
        return state, False
    return _next(body, verdict, length, state), True


def _step(body: Any, cond: Any, length: Length, state: Any, _: Any) -> tuple[Any, None]:
    """A step of a replay. The condition is part of it: it may read tensors and draw numbers."""
    verdict = cond(state)
    if not isinstance(verdict, Tensor) and not verdict:
        raise ReplayError(
            "remat_loop: the condition ends a replay before the step at which the forward ended, "
            "so something it reads changed in between. Keep it in the loop's state."
        )
    return _next(body, verdict, length, state), None


def _goes_on(verdict: Any, length: Length) -> bool:
    """Whether the loop goes on, for one example at least."""
    if not isinstance(verdict, Tensor):
        return bool(verdict)
    if verdict.numel() != 1:
        raise ValueError(
            f"remat_loop: the condition must be one boolean, got {describe(verdict)}; reduce it "
            "with .any() or .all()"
        )
    length.masked |= batched(verdict)
    # Not shown to the region's record of tensors, but to that of what its replays must compute.
    with tracking(SILENT), watching(True):
        return bool(base_of(verdict).any())


def _next(body: Any, verdict: Any, length: Length, state: Any) -> Any:
    """The next state; examples of a ``vmap`` that are done keep theirs."""
    new = body(state)
    if not length.masked:
        return new
    old_leaves, spec = _tree.flatten(state)
    try:
        new_leaves = _tree.leaves_as(spec, new)
    except ValueError:
        raise TypeError(
            "remat_loop: under vmap, where examples end at different steps, body must return a "
            f"state of the structure it was given, {_tree.shown(spec)}, got "
            f"{_tree.shown(_tree.flatten(new)[1])}"
        ) from None
    done = []
    for a, b in zip(old_leaves, new_leaves):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            b = torch.where(verdict.reshape(()), b, a)
        elif isinstance(a, Tensor) or isinstance(b, Tensor) or a != b:
            raise TypeError(
                "remat_loop: under vmap, where examples end at different steps, what changes in "
                f"the state must be tensors; got {describe(a)} and then {describe(b)}"
            )
        done.append(b)
    return _tree.unflatten(spec, done)
