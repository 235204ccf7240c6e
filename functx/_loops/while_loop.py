"""Loops whose number of steps depends on a condition.

They run in blocks of 1, 2, 4, ... steps. Each block is a region, whose first half is a region
again, and so on. A block stops when the condition is false, in the forward and in replays. So a
loop of ``n`` steps saves about ``log2(n)`` states between the passes and twice as many in its
backward pass, which runs each step ``1 + log2(n) / 2`` times again.

NOTE [examples that are done]
Under ``vmap`` the body runs until the last example is done. An example that is done keeps its
state: the body still runs for it, but the result is dropped and gets a cotangent of zero. Zero
times an infinite derivative would be nan. So the body gets, for that example, the last state for
which the condition was true. An example that is done before the first step has no such state. For
it the body runs on the first state, and tensors that the body closes over are constants.

What could be improved: online checkpointing (Stumm and Walther, SIAM J. Sci. Comput. 32(2), 2010)
needs fewer states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from functx import _torch
from functx._core import describe, tree
from functx._remat import Options, is_tracked, listening, run
from functx._torch.process_patches import is_mapped

Body = Callable[[Any], Any]
Cond = Callable[[Any], Any]


class Examples(NamedTuple):
    """The examples of ``vmap``, once the condition has been a mapped tensor."""

    alive: Tensor  # which examples go on
    # For each leaf of the state, the last value for which an example went on, as a constant.
    good: list[Any]
    started: Tensor | None  # which examples have run the body at all; ``None`` if all have


def loop(body: Body, cond: Cond, state: Any, most: int | None, name: str) -> Any:
    """``while cond(state): state = body(state)``, at most ``most`` times."""
    alive, goes_on = _who_goes_on(cond(state), None)
    examples = None
    if alive is not None:
        started = alive if _any(~alive) else None
        examples = Examples(alive, _undifferentiated(state), started)
    taken = 0
    while goes_on and (most is None or taken < most):
        steps = taken + 1 if most is None else min(taken + 1, most - taken)
        state, examples, goes_on = _region(body, cond, name, state, examples, steps)
        taken += steps
    return state


def _region(
    body: Body, cond: Cond, name: str, state: Any, examples: Examples | None, steps: int
) -> Any:
    def block(state: Any, examples: Examples | None) -> Any:
        return _block(body, cond, name, state, examples, steps)

    # A block may stop at any of its steps, so few runs are like an earlier one.
    options = Options(name=f"up to {steps} steps of {name}", varies=steps > 1)
    return run(block, (state, examples), {}, options)


def _block(
    body: Body, cond: Cond, name: str, state: Any, examples: Examples | None, steps: int
) -> tuple[Any, Examples | None, bool]:
    """Run one to ``steps`` steps while the condition holds. It must hold at the start.

    Returns:
        The last state, the examples under ``vmap``, and whether the loop goes on.
    """
    while steps > 1:
        half = steps // 2
        state, examples, goes_on = _region(body, cond, name, state, examples, half)
        if not goes_on:
            return state, examples, False
        steps -= half
    if examples is None:
        before, state = state, body(state)
        alive, goes_on = _who_goes_on(cond(state), None)
        if alive is not None:  # the condition was the same for all examples until now
            examples = Examples(alive, _undifferentiated(before), None)
        return state, examples, goes_on
    alive, good, started = examples
    start = _state_for_body(alive, state, good)
    if started is None:
        new = body(start)
    else:
        with _ConstantUnlessStarted(started):
            new = body(start)
    state = _masked(alive, state, new)
    alive, goes_on = _who_goes_on(cond(state), alive)
    assert alive is not None  # because it was not None before
    return state, Examples(alive, _undifferentiated(start), started), goes_on


def _who_goes_on(verdict: Any, alive: Tensor | None) -> tuple[Tensor | None, bool]:
    """Which examples go on, and whether the loop does, that is whether any example does.

    Args:
        verdict: the result of the condition.
        alive: which examples went on before; ``None`` if the condition was never mapped.
    """
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
    return verdict, _any(verdict)


def _any(verdict: Tensor) -> bool:
    """Whether ``verdict`` is true for any example, of all levels of ``vmap``."""
    while _torch.level_of(verdict) > 0:
        verdict = _torch.inner_of(verdict)
    return bool(verdict.any())


def _undifferentiated(state: Any) -> list[Any]:
    """The leaves of a state, as constants."""
    return [x.detach() if isinstance(x, Tensor) else x for x in tree.flatten(state)[0]]


def _state_for_body(alive: Tensor, state: Any, good: list[Any]) -> Any:
    """The state that the body gets: for examples that are done, their last good state."""
    leaves, spec = tree.flatten(state)
    for i, (x, last) in enumerate(zip(leaves, good)):
        if isinstance(x, Tensor) and isinstance(last, Tensor):
            leaves[i] = torch.where(alive, x, last)
    return tree.unflatten(spec, leaves)


class _ConstantUnlessStarted(TorchFunctionMode):
    """Makes tensors that the body closes over constants for examples that never started.

    See NOTE [examples that are done].
    """

    def __init__(self, started: Tensor) -> None:
        self.started = started
        # The replacement of each captured tensor; ``None`` for a tensor that the body computed.
        self.replacements = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if listening() is None:  # nothing is differentiated, or autograd runs its backward
            return func(*args, **(kwargs or {}))
        changes = _changes_its_first_argument(func)
        rest = tree.map_(self._constant_unless_started, (args[changes:], kwargs or {}))
        out = func(*args[:changes], *rest[0], **rest[1])
        for x in tree.leaves(out):
            if isinstance(x, Tensor):
                self.replacements[x] = None
        return out

    def _constant_unless_started(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not is_tracked(x):
            return x
        if x not in self.replacements:
            self.replacements[x] = torch.where(self.started, x, x.detach())
        replacement = self.replacements[x]
        return x if replacement is None else replacement


def _masked(alive: Tensor, state: Any, new: Any) -> Any:
    """The next state. Examples that are done keep their old state."""
    old_leaves, new_leaves, spec = aligned("remat_loop", state, new)
    for i, (a, b) in enumerate(zip(old_leaves, new_leaves)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            new_leaves[i] = torch.where(alive, b, a)
        elif isinstance(a, Tensor) or isinstance(b, Tensor) or a != b:
            raise TypeError(
                "remat_loop: under vmap, where examples end at different steps, only tensors in "
                f"the state may change; got {describe(a)} and then {describe(b)}"
            )
    return tree.unflatten(spec, new_leaves)


_CHANGES = {"__setitem__", "__set__", "register_hook", "retain_grad"}


def _changes_its_first_argument(func: Any) -> bool:
    """Whether a function writes to a tensor or adds a hook, so that no copy can replace it."""
    name = getattr(func, "__name__", "")
    return name in _CHANGES or (name.endswith("_") and not name.endswith("__"))


def aligned(api: str, before: Any, after: Any) -> tuple[list[Any], list[Any], Any]:
    """The leaves of two states in one order, and their structure, which must be the same."""
    old, spec = tree.flatten(before)
    try:
        return old, [*tree.leaves_as(spec, after)], spec
    except ValueError:
        raise TypeError(
            f"{api}: body must return a state of the same structure that it got, "
            f"{tree.shown(spec)}; got {tree.shown(tree.flatten(after)[1])}"
        ) from None
