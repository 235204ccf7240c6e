"""The forward: the function runs once, in the caller's levels and grad mode, and is recorded.

It runs on stand-ins, on a tape of its own, which is dropped when it has returned. What is left is
the results, and what a replay needs to know (`Region`). Then, from the lowest level that
differentiates anything, the results get one node a level (`node.attach`).
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import Any

import torch.autograd.forward_ad as fwAD
from torch import Tensor

from functx import _torch
from functx._remat import leaving, levels, node, plans, saving
from functx._remat.captures import Captures
from functx._remat.generators import Draws
from functx._remat.guard import Entry
from functx._remat.ledger import Record, needed
from functx._remat.listener import Body, Listener, listening
from functx._remat.region import NEVER, Inputs, Options, Region
from functx._remat.writes import Writes


def run(
    body: Body,
    again: Body,
    tensors: list[Tensor],
    options: Options,
    title: str,
    identity: Any = None,
    trace: Any = None,
) -> list[Tensor]:
    """Run ``body``, and remember how to run it ``again``.

    Args:
        body: tensors to tensors.
        again: the same, for replays.
        tensors: its arguments, no two of them the same.
        options: what the user said.
        title: what messages call the region.
        identity: code and owner of the function, which a plan is found by.
        trace: a `traced.Trace` that the region is to be a node of, or ``None``.

    Returns:
        The body's results, on nodes that replay it.
    """
    outer = listening()
    if outer is not None:
        tensors = outer.take(options.name, tensors)
        last = outer.last
    with Entry(outer) as entry:
        entry.stop_caching(entry.settings)
        entry.take_hooks()
        region = Region()
        region.title, region.identity, region.body = title, identity, again
        region.options, region.settings = options, entry.settings
        results, further = _run(region, body, tensors, outer, trace)
    if outer is not None:
        outer.last = last
        outer.give(results)
        outer.give_further(further)
    return results


def _run(
    region: Region, body: Body, tensors: list[Tensor], outer: Listener | None, trace: Any
) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
    options = region.options
    region.frames = levels.frames() if _torch.peek_interpreter() is not None else []
    region.n_args, region.draws = len(tensors), None
    if options.preserve_rng_state or trace is not None:
        region.draws = Draws(python=options.preserve_rng_state == "all")
    record = Record(region.draws)
    if trace is None:
        record.saver = saving.saver_for(options.policy)
    inputs = Inputs(region.frames)
    expected, plan = (None, None) if outer is None else outer.log_inside()
    captures = (Captures if trace is None else trace.captures)(
        region, inputs, record, outer, expected
    )
    if outer is not None:
        captures.wanted, call = outer.wanted_inside(), outer.last[0]
    for t in tensors:
        captures.admit(levels.alive(t))
    if trace is None and record.saver is None and region.identity is not None:
        captures.key = plans.key_of(region, inputs)
        if expected is None:
            plan = plans.find(captures.key)
    else:
        plan = None
    noting = Writes if trace is None else trace.writes
    writes = record.writes = noting(inputs, captures.made, region.title)
    captures.begin(plan)
    _torch.push_function_mode(captures)
    results = captures.finish(body(*inputs.standins))
    _torch.pop_function_mode()
    captures.end()
    if region.draws is not None and region.draws.before:
        region.draws.end()
    tensors = []
    if trace is not None:
        inputs.lowest = 0
    further: list[tuple[int, Tensor]] = []
    if inputs.lowest <= len(region.frames):  # else nobody differentiates it
        results, further = _finish(region, inputs, captures, writes, results, trace)
    if outer is not None:
        call.inner = captures.calls, captures.plan
    return results, further


def _finish(
    region: Region,
    inputs: Inputs,
    captures: Captures,
    writes: Writes,
    results: list[Tensor],
    trace: Any,
) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
    """Let go of the tape, and hang the results on nodes."""
    frames, n, lowest = region.frames, len(region.frames), inputs.lowest
    region.calls, region.slots = captures.calls, inputs.slots
    region.made, region.written = captures.made, writes.inputs_written() if writes.before else []
    region.left_behind = captures.known
    region.n_results = len(results)
    leaves = leaving.leaves_unseen(captures, results) if captures.may_hide() else []
    # Level by level down to the lowest one that needs a node, ...
    parts, slots = _taken_apart(results, frames, lowest)
    _leave_out(region, captures, results, parts[lowest])
    kept = region.kept.take()
    if writes.before:
        writes.put_before()
    required = {k: _required(parts[k], k, inputs) for k in range(lowest, n + 1)}
    # ... and up again.
    values = parts[lowest]
    fresh = [_off_the_tape(t, lowest) for t in values]
    region.further = []
    further: list[tuple[int, Tensor]] = []
    if n == 0:
        results.clear()
        values.clear()
        parts.clear()
        further = leaving.further_results(captures)
        if captures.tapes_met:
            leaving.check_threads(captures)
        region.further = [number for number, _ in further]
        fresh += [t for _, t in further]
        required[0] += [True] * len(further)
    if trace is not None:
        trace.emit(region, inputs, writes, fresh)
    for k in range(lowest, n + 1):
        if k > lowest:
            lift = frames[k - 1].lift_all
            if trace is not None:
                lift = partial(trace.traced, lift)
            fresh = lift(fresh, slots[k], k)
        if True in inputs.requires(k) and True in required[k]:
            extra = leaves if k == 0 else []
            fresh = node.attach(
                *(region, k, inputs, extra, fresh, required[k], kept),
                captures.outer is None,
            )
    results.clear()
    values = []
    parts.clear()
    if n:
        leaving.check_nothing_left(captures, fresh)
    if captures.plan is None:
        captures.plan = plans.make(captures, region, leaves)
    return fresh[: region.n_results], further


def _leave_out(
    region: Region, captures: Captures, results: list[Tensor], lowest: list[Tensor]
) -> None:
    """Find what a replay may leave out (rule 6): the plan says, or what is alive."""
    plan, record = captures.plan, captures.record
    region.kept = saving.NOTHING
    if plan is not None:
        region.entries, region.starts = plan.entries, plan.starts
        region.live, region.left_out = plan.live, plan.left_out
        return
    region.entries, region.starts = record.entries, record.starts
    region.live, region.left_out = None, NEVER
    if captures.departed:
        return
    saver = record.saver
    held = [] if saver is None else saver.held()
    read = needed(record, [*results, *lowest], held)
    if region.options.early_stop:
        region.live = record.live(read, {} if saver is None else saver.kept)
    if saver is not None:
        region.left_out = 0
        region.kept = saver.settled(region.live)
    elif region.live is not None and (at := region.live.find(0)) >= 0:
        region.left_out = bisect_right(region.starts, at) - 1


def _taken_apart(
    results: list[Tensor], frames: list[levels.Frame], lowest: int
) -> tuple[dict[int, list[Tensor]], dict[int, list[Any]]]:
    """The results at each level down to ``lowest``, and how they are made of those one below."""
    parts, slots = {len(frames): results}, {}
    for k in range(len(frames), lowest, -1):
        parts[k - 1], slots[k] = frames[k - 1].lower_all(parts[k], k)
    return parts, slots


def _required(values: list[Tensor], k: int, inputs: Inputs) -> list[bool]:
    """Which results require grad at level k."""
    if k and inputs.frames[k - 1].kind is not levels.GRAD:
        return []
    # (A view made under no_grad at a functorch level says that it requires grad.)
    return [
        t.requires_grad
        and (k == 0 or _torch.level_of(t) == k)
        and (t.grad_fn is not None or id(t) in inputs.leaves)
        for t in values
    ]


def _off_the_tape(t: Tensor, k: int) -> Tensor:
    """A result that its tape does not know."""
    if k == 0:
        if _torch.dual_level() >= 0 and fwAD.unpack_dual(t).tangent is not None:
            raise AssertionError("functx: a dual of plain forward mode at the base level")
        return levels.detached(t)
    if _torch.level_of(t) == k:
        return _torch.wrap_grad(_torch.unwrap_grad(t, k), k)
    return t
