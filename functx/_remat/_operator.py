"""The remat operator: a region meets the transforms that are active, from the innermost outwards.

Every transform has a rule, and every rule answers with a remat of the derived function: a
`_rules.base.Frame` that is called one level down. At the bottom, the base rule runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._errors import RematError
from functx._remat._depth import nested
from functx._remat._entry import (
    Calls,
    calls_inside,
    fingerprint,
    nested_region,
    nested_run,
    nested_values,
)
from functx._remat._gradients import retain
from functx._remat._leaving import put_in_place, settle
from functx._remat._levels import saved_levels
from functx._remat._options import Options
from functx._remat._region import Flat, Region
from functx._remat._tracker import SILENT, Tracker, active_tracker, listener, tracking
from functx._remat._watch import nobody_watches

_RULES: dict[Any, Callable[[Any, Flat, Region], Any]] = {}
_BASE: list[Callable[[Flat, Sequence[Tensor], Region], list[Tensor | None]]] = []


def rule(transform: Any) -> Callable[[Any], Any]:
    """Register a frame as the rule of a transform."""

    def register(frame: Any) -> Any:
        _RULES[transform] = frame
        return frame

    return register


def base_rule(run: Any) -> Any:
    """Register what happens below all transforms."""
    _BASE.append(run)
    return run


def call(region: Region, *, made_here: bool = False) -> list[Tensor | None]:
    """Run a region on its inputs, under whatever transforms are active.

    Args:
        region: what to run.
        made_here: the inputs are known to be of the region that is running around this one, if
            any; a node of its tape is pulled back.

    Returns:
        One tensor for each distinct result, ``None`` where a result is zero.
    """
    inputs = region.inputs
    outer = active_tracker()
    if outer is not None and not made_here:  # as they are: it knows them by identity
        inputs = outer.operands(nested_region, inputs)
    inputs = _torch.unwrap_dead(inputs)
    region.inputs, region.outer = inputs, outer
    if outer is not None or _torch.peek_interpreter_stack() is not None:
        region.outer_levels = saved_levels()
    left: Sequence[Tensor] = ()
    with nested(region.options.name):
        silence = None if nobody_watches() else tracking(SILENT)
        if silence is not None:
            silence.__enter__()
        try:
            outs = _lower(region, inputs, region)
            if region.leaving:
                left, region.leaving = region.leaving, ()
                if hasattr(region.body, "forget"):
                    region.body.forget(left, region.environment.before())
                put_in_place([*left], outs, region.options.name, region.taped)
            elif (
                region.environment is not None
                and region.environment.lost_any()
                and hasattr(region.body, "forget")
            ):
                region.body.forget((), region.environment.before())
            if region.settled:
                settle(region.settled)
            region.write_back([*outs, *left])
            results = region.assemble(outs)
            retained, region.retained = region.retained, ()
            computed = () if outer is None else region.computed(results, outs)
        finally:
            region.release()
            if silence is not None:
                silence.__exit__()
    if outer is not None:
        outer.note(computed)
        outer.note(left)
        if region.keepers:
            outer.keepers = [*outer.keepers, *region.keepers]
    if region.entries and (around := listener()) is not None:
        _tell(region, around)
    if outer is not None and region.options.values:
        # A replay of the outer region runs this one afresh; it can only compare from outside.
        outer.operands(nested_values, [region.values()])
    if retained:
        retain(retained, results)
    return results


def _tell(region: Region, around: Tracker) -> None:
    """Who compares what is around the region, which replays run afresh, is told what it ran."""
    if region.options.determinism_check == "none":
        return
    if not region.options.replay:
        number, seed = fingerprint(region.entries), torch.default_generator.initial_seed()
        inside = calls_inside(region.entries)
        around.compared(nested_run, number if seed == around.seed else number ^ seed, *inside)
    elif (calls := Calls(region.entries)).entries:
        if around.silent:
            for e in calls.entries:
                around.compared(e.func, *e.scalars)
        else:
            around.compared(nested_run, calls)


def _lower(fn: Flat, inputs: Sequence[Tensor], region: Region) -> list[Tensor | None]:
    if _torch.peek_interpreter_stack() is None:
        return _BASE[0](fn, inputs, region)
    interpreter = _torch.current_interpreter()
    make_frame = _RULES.get(interpreter.key())
    if make_frame is None:
        raise RematError(
            f"remat: no rule for the transform {interpreter.key()}; functx knows "
            f"{', '.join(str(k) for k in _RULES)}."
        )
    frame = make_frame(interpreter, fn, region)
    lowered = frame.lower_all(inputs)
    frame.inputs = inputs
    region.frames.insert(0, frame)
    with interpreter.lower():
        outs = _lower(frame, lowered, region)
    return frame.finish(outs, inputs)


def differentiating() -> bool:
    """Whether any derivative can be taken of what runs now; if not, a region is its function."""
    if torch.is_grad_enabled() or _torch.forward_ad_level() >= 0:
        return True
    return any(
        interpreter.key() in (_torch.TransformType.Grad, _torch.TransformType.Jvp)
        for interpreter in _torch.interpreters()
    )


__all__ = ["Options", "Region", "base_rule", "call", "differentiating", "rule"]
