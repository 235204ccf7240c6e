"""``remat(f, budget=)``: a function as a program in blocks, run as a plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._costs import walk
from functx._errors import RematError
from functx._plan import Plan, chosen, function_planner
from functx._program import Program, record
from functx._remat import Options, is_tracked, listening, on_budget, unseen
from functx._residuals import undisturbed
from functx._storages import storages_of

REMEMBERED = 256


@on_budget
def run_planned(f: Callable[..., Any], args: Any, kwargs: Any, o: Options) -> Any:
    """``f(*args, **kwargs)``, recomputing what the plan for it says."""
    program = record(f, args, kwargs, o.name)
    plan = o.budget
    if not isinstance(plan, Plan):
        values = [*program.values.values()]
        # In a region around it, a replay must find the plan of the forward, at whatever level.
        tracked = size = None
        if listening() is None:
            tracked, size = tuple(map(is_tracked, values)), tuple(map(_size, values))
            if True not in tracked:  # forward mode keeps nothing
                blocks = program.blocks()
                return program.finish(walk([*range(len(blocks))], blocks, program.values))
        key = program.signature(), tracked, size
        assert o.plans is not None  # there is a budget
        plan = o.plans.get(key)
        if plan is None:
            if len(o.plans) >= REMEMBERED:
                o.plans.clear()
            plan = o.plans[key] = _planned(program, o.budget, f"a budget for {o.name!r}")
    blocks = program.blocks()
    if len(blocks) != plan.blocks or plan.names != _names(blocks):
        raise RematError(
            f"remat: the plan was made for another function, or for other shapes: {o.name!r} runs "
            f"{len(blocks)} blocks of operations, and the plan has {plan.blocks}."
        )
    return program.finish(walk(plan.nested, blocks, dict(program.values), o))


@function_planner
def plan_function(f: Callable[..., Any], args: Any, kwargs: Any, budget: Any) -> Plan:
    """The plan for a call."""
    name = getattr(f, "__qualname__", type(f).__name__)
    return _planned(record(f, args, kwargs, name), budget, f"a budget for {name!r}")


def _planned(program: Program, budget: Any, api: str) -> Plan:
    """The plan for a program, measured where this is called."""
    some = any(map(is_tracked, program.values.values()))

    def wanted(t: Tensor) -> bool:
        return is_tracked(t) if some else t.is_floating_point() or t.is_complex()

    generators = [(g, g.get_state()) for g in program.generators()]
    blocks = program.blocks()
    with unseen(), _torch.without_dispatch_modes(), undisturbed([]):
        try:
            return chosen(blocks, dict(program.values), budget, _names(blocks), api, wanted)
        finally:
            for generator, state in generators:
                generator.set_state(state)
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()


def _size(t: Tensor) -> int:
    """Bytes of a tensor below all transforms."""
    return sum(storage.nbytes() for storage in storages_of(t))


def _names(blocks: Any) -> tuple[str, ...]:
    return tuple(block.__qualname__ for block in blocks)
