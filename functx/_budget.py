"""Budgets: `plan`, and ``remat(f, budget=)``, a function in blocks of operations run as planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._costs import walk
from functx._errors import RematError
from functx._labels import labels
from functx._plan import Plan, blocks_of, chosen, names_of
from functx._recording import Recording, record
from functx._remat import Options, is_tracked, listening, on_budget, unseen
from functx._saved import undisturbed
from functx._storages import storages_of
from functx._validate import check_callable, checked_budget, name_of

REMEMBERED = 256


def plan(f: Any, /, *args: Any, budget: int | float | str, **kwargs: Any) -> Plan:
    """Choose what to recompute, so that ``f`` and its pullback fit in ``budget``.

    Blocks are measured; the cuts that recompute least are found by a dynamic programme over
    all nestings of regions, and measured again as a whole, by one forward and one backward pass.
    Derivatives are those of the tensors that require grad, in the arguments and reached otherwise;
    if no argument does, of all floating point arguments. Their bytes are part of the peak. Other
    uses may take more: several cotangents at once, derivatives of derivatives, a pullback that is
    kept to be called again.

    Args:
        f: blocks that are called one after another, each with the result of the one before: an
            ``nn.Sequential``, an ``nn.ModuleList``, a list of callables. Or any function or
            module: its operations are the blocks, up to 32 of them, more are taken together.
        *args: what ``f`` is called with; a chain, with one argument, any pytree.
        budget: the most bytes that the forward and the backward pass may have live beside what
            was there before, as an int or a text such as ``"2GiB"``; a float up to 1 is a share of
            what they have without regions.
        **kwargs: likewise, for a function.

    Returns:
        A `Plan`: ``plan.apply(f)(x)`` is ``f(x)`` with the regions of the plan, and so is
        ``functx.remat(f, policy=plan)`` for a function.

    Raises:
        TypeError: blocks are no callables; ``budget`` is neither a number nor a text.
        ValueError: no plan fits; the message says what the least possible is.
        functx.RematError: what a function runs depends on values, or can't be recorded.

    Example:
        >>> import torch, functx
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())] * 12
        >>> x = torch.ones(500, 64)
        >>> plan = functx.plan(layers, x, budget=0.6)
        >>> plan.peak <= plan.budget <= 0.6 * plan.peak_without
        True
        >>> torch.equal(plan.apply(layers)(x), torch.nn.Sequential(*layers)(x))
        True
    """
    budget = checked_budget(budget, "functx.plan")
    blocks = blocks_of(f)
    if blocks is None:
        check_callable(f, "functx.plan")
        name = name_of(f)
        return _planned(record(f, args, kwargs, name), budget, name)
    for block in blocks:
        check_callable(block, "functx.plan")
    if not blocks:
        raise ValueError("functx.plan: there are no blocks")
    if len(args) != 1 or kwargs:
        raise TypeError(f"functx.plan: blocks are called with one argument, got {len(args)}")
    buffers = [t for b in blocks for t, (kind, _) in labels(b, (), {}) if kind == "buffer"]
    with undisturbed(buffers):
        return chosen(blocks, args[0], budget, "functx.plan")


@on_budget
def run_planned(f: Callable[..., Any], args: Any, kwargs: Any, o: Options) -> Any:
    """``f(*args, **kwargs)``, recomputing what the plan for it says."""
    recording = record(f, args, kwargs, o.name)
    blocks, values, plan = recording.blocks(), recording.values, o.budget
    if not isinstance(plan, Plan):
        # In a region around it, a replay must find the plan of the forward, at whatever level.
        tracked = size = None
        if listening() is None:
            tracked, size = (
                tuple(map(is_tracked, values.values())),
                tuple(map(_size, values.values())),
            )
            if True not in tracked:  # forward mode keeps nothing
                return recording.finish(walk(range(len(blocks)), blocks, values))
        key = recording.signature(), tracked, size
        assert o.plans is not None  # there is a budget
        if key not in o.plans:
            if len(o.plans) >= REMEMBERED:
                o.plans.clear()
            o.plans[key] = _planned(recording, o.budget, o.name)
        plan = o.plans[key]
    if plan.names != names_of(blocks):
        raise RematError(
            f"remat: the plan was made for another function, or for other shapes: {o.name!r} runs "
            f"{len(blocks)} blocks of operations, and the plan has {plan.blocks}."
        )
    return recording.finish(walk(plan.tree, blocks, values, o))


def _planned(recording: Recording, budget: Any, name: str) -> Plan:
    """The plan for what a function runs, measured where this is called."""
    others = [o[0] for operation in recording.operations for o in operation.how[1] if o]
    generators = {g: g.get_state() for g in others if isinstance(g, torch.Generator)}
    with unseen(), _torch.without_dispatch_modes(), undisturbed([]):
        try:
            return chosen(recording.blocks(), recording.values, budget, f"a budget for {name!r}")
        finally:
            for generator, state in generators.items():
                generator.set_state(state)
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()


def _size(t: Tensor) -> int:
    """Bytes of a tensor below all transforms."""
    return sum(storage.nbytes() for storage in storages_of(t))
