"""Loops whose length is known only when they have ended.

They run in blocks of 1, 2, 4, ... steps. Each block is a region, whose first half is a region
again, and so on; it stops where the condition says so, in a replay as in the forward. So a loop of
``n`` steps keeps about ``log2(n)`` states between the passes and twice as many in its backward
pass, which runs each step ``1 + log2(n) / 2`` times again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._core import describe, tree
from functx._remat import Options, run
from functx._torch.process_patches import is_mapped

Body = Callable[[Any], Any]
Cond = Callable[[Any], Any]


def loop(body: Body, cond: Cond, state: Any, most: int | None, name: str) -> Any:
    """``while cond(state): state = body(state)``, at most ``most`` times."""
    alive, goes_on = _asked(cond(state), None)
    taken = 0
    while goes_on and (most is None or taken < most):
        steps = taken + 1 if most is None else min(taken + 1, most - taken)
        state, alive, goes_on = _region(body, cond, name, state, alive, steps)
        taken += steps
    return state


def _region(body: Body, cond: Cond, name: str, state: Any, alive: Any, steps: int) -> Any:
    def block(state: Any, alive: Any) -> Any:
        return _block(body, cond, name, state, alive, steps)

    return run(block, (state, alive), {}, Options(name=f"up to {steps} steps of {name}"))


def _block(
    body: Body, cond: Cond, name: str, state: Any, alive: Tensor | None, steps: int
) -> tuple[Any, Tensor | None, bool]:
    """One step, and more while the condition holds, which it does at the start, up to so many.

    Returns:
        The last state, under ``vmap`` which examples go on, and whether the loop does.
    """
    while steps > 1:
        half = steps // 2
        state, alive, goes_on = _region(body, cond, name, state, alive, half)
        if not goes_on:
            return state, alive, False
        steps -= half
    new = body(state)
    state = new if alive is None else _masked(alive, state, new)
    return state, *_asked(cond(state), alive)


def _asked(verdict: Any, alive: Tensor | None) -> tuple[Tensor | None, bool]:
    """Which examples go on, and whether the loop does: it does while one of them does."""
    if not isinstance(verdict, Tensor):
        return alive, bool(verdict)
    if verdict.numel() != 1:
        raise ValueError(
            f"remat_loop: the condition must be one boolean, got {describe(verdict)}; reduce it "
            "with .any() or .all()"
        )
    verdict = verdict.reshape(()) != 0
    if alive is not None:
        verdict = verdict & alive
    elif not is_mapped(verdict):
        return None, bool(verdict)
    examples = verdict
    while _torch.level_of(examples) > 0:
        examples = _torch.inner_of(examples)
    return verdict, bool(examples.any())


def _masked(alive: Tensor, state: Any, new: Any) -> Any:
    """The next state; examples that are done keep theirs."""
    old_leaves, new_leaves, spec = aligned("remat_loop", state, new)
    for i, (a, b) in enumerate(zip(old_leaves, new_leaves)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            new_leaves[i] = torch.where(alive, b, a)
        elif isinstance(a, Tensor) or isinstance(b, Tensor) or a != b:
            raise TypeError(
                "remat_loop: under vmap, where examples end at different steps, what changes in "
                f"the state must be tensors; got {describe(a)} and then {describe(b)}"
            )
    return tree.unflatten(spec, new_leaves)


def aligned(api: str, before: Any, after: Any) -> tuple[list[Any], list[Any], Any]:
    """The leaves of two states in one order, and their structure, which must be the same."""
    old, spec = tree.flatten(before)
    try:
        return old, [*tree.leaves_as(spec, after)], spec
    except ValueError:
        raise TypeError(
            f"{api}: body must return a state of the structure it was given, {tree.shown(spec)}, "
            f"got {tree.shown(tree.flatten(after)[1])}"
        ) from None
