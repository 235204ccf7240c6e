"""The forward: the function runs once, in the caller's levels and grad mode, and is recorded.

It runs on stand-ins, on a tape of its own, which is dropped when it has returned. What is left is
the results, and what a replay needs to know (`Region`). Then, from the lowest level that
differentiates anything, the results get one node a level (`node.attach`).
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from types import CodeType
from typing import Any

import torch.autograd.forward_ad as fwAD
from torch import Tensor

from functx import _torch
from functx._remat import leaving, levels, liveness, node, saving
from functx._remat.calls import Body, Listener, listening
from functx._remat.captures import Captures
from functx._remat.generators import Draws
from functx._remat.guard import Noted
from functx._remat.ledger import Record
from functx._remat.region import NEVER, Inputs, Options, Region
from functx._remat.settings import CastCache, Settings
from functx._remat.writes import Writes


def run(
    body: Body,
    again: Body,
    tensors: list[Tensor],
    options: Options,
    title: str,
    code: CodeType | None = None,
    trace: Any = None,
) -> list[Tensor]:
    """Run ``body``, and remember how to run it ``again``.

    Args:
        body: tensors to tensors.
        again: the same, for replays.
        tensors: its arguments, no two of them the same.
        options: what the user said.
        title: what messages call the region.
        code: of the function, for messages.
        trace: a `traced.Trace` that the region is to be a node of, or ``None``.

    Returns:
        The body's results, on nodes that replay it.
    """
    noted = Noted()
    settings = Settings()
    outer = listening()
    try:
        if outer is not None:
            tensors = outer.take(options.name, tensors)
            outer.asleep = True
        cache = CastCache(settings)
        noted.take_hooks()
        region = Region()
        region.title, region.code, region.body = title, code, again
        region.options, region.settings = options, settings
        results, further = _run(region, body, tensors, outer, trace)
        noted.put_hooks_back()
        cache.put_back()
        if outer is not None:
            outer.asleep = False
            outer.give(results)
            outer.give_further(further)
        return results
    except BaseException:
        noted.cut_back()
        settings.put(Settings())
        if settings.casts is not None:
            cache.put_back()
        if outer is not None:
            outer.asleep = False
        raise


def _run(
    region: Region, body: Body, tensors: list[Tensor], outer: Listener | None, trace: Any
) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
    options = region.options
    region.frames = levels.frames() if _torch.peek_interpreter() is not None else []
    region.draws = None
    if options.preserve_rng_state or trace is not None:
        region.draws = Draws(python=options.preserve_rng_state == "all")
    record = Record(region.draws)
    if trace is None:
        record.saver = saving.saver_for(options.policy)
    inputs = Inputs(region.frames)
    expected = None if outer is None else outer.expects_inside()
    listener = Captures if trace is None else trace.captures
    captures = listener(region, inputs, record, outer, expected)
    captures.strict = options.determinism_check != "none"
    if outer is not None:
        outer.calls[-1].inner = captures.calls
        captures.wanted = outer.wanted_inside()
    for t in tensors:
        captures.admit(levels.alive(t))
    region.n_args = captures.n_args = len(tensors)
    noting = Writes if trace is None else trace.writes
    writes = record.writes = noting(inputs, captures.made, region.title)
    _torch.push_dispatch_mode(record)
    _torch.push_function_mode(captures)
    results = [captures.result(t) for t in body(*inputs.standins)]
    captures.finish()
    _torch.pop_function_mode()
    _torch.pop_dispatch_mode(None)
    if region.draws is not None:
        region.draws.end()
    tensors = []
    if trace is not None:
        inputs.lowest = 0
    elif inputs.lowest > len(region.frames):
        return results, []  # nobody differentiates it
    return _finish(region, inputs, captures, writes, results, trace)


def _finish(
    region: Region,
    inputs: Inputs,
    captures: Captures,
    writes: Writes,
    results: list[Tensor],
    trace: Any,
) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
    """Let go of the tape, and hang the results on nodes."""
    record = captures.record
    frames, n, lowest = region.frames, len(region.frames), inputs.lowest
    region.calls, region.slots = captures.calls, inputs.slots
    region.entries, region.starts = record.entries, record.starts
    region.made, region.written = captures.made, writes.inputs_written()
    region.left_behind = captures.known
    region.n_results = len(results)
    leaves = leaving.leaves_unseen(captures, results) if captures.unseen else []
    # Level by level down to the lowest one that needs a node, ...
    parts, slots = _taken_apart(results, frames, lowest)
    saver = record.saver
    held = [] if saver is None else saver.held()
    kept = {} if saver is None else saver.kept
    needed = liveness.needed(record, [*results, *parts[lowest]], held)
    del held
    region.live = record.live(needed, kept) if region.options.early_stop else None
    region.left_out = 0 if saver is not None else _first_left_out(region)
    region.kept = saving.settled(saver, region.live)
    kept_tensors = region.kept.take()
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
        region.further = [number for number, _ in further]
        fresh += [t for _, t in further]
        required[0] += [True] * len(further)
    if trace is not None:
        trace.emit(region, inputs, writes, fresh)
    lift = _put_together if trace is None else partial(trace.traced, _put_together)
    for k in range(lowest, n + 1):
        if k > lowest:
            fresh = lift(fresh, frames[k - 1], slots[k], k)
        requires = inputs.requires(k)
        if True in requires and True in required[k]:
            extra = leaves if k == 0 else []
            fresh = node.attach(
                *(region, k, inputs.values[k], requires, extra, fresh, required[k], kept_tensors),
                captures.outer is None,
            )
    results.clear()
    values = []
    parts.clear()
    if n:
        leaving.check_nothing_left(captures, fresh)
    return fresh[: region.n_results], further


def _first_left_out(region: Region) -> int:
    """The first call in which something is not live."""
    at = -1 if region.live is None else region.live.find(0)
    return NEVER if at < 0 else bisect_right(region.starts, at) - 1


def _taken_apart(
    results: list[Tensor], frames: list[levels.Frame], lowest: int
) -> tuple[dict[int, list[Tensor]], dict[int, list[Any]]]:
    """The results at each level down to ``lowest``, and how they are made of those one below."""
    parts, slots = {len(frames): results}, {}
    for k in range(len(frames), lowest, -1):
        lowered = [frames[k - 1].lower(t, k) for t in parts[k]]
        slots[k] = [slot for _, slot in lowered]
        parts[k - 1] = [value for values, _ in lowered for value in values]
    return parts, slots


def _put_together(
    values: list[Tensor], frame: levels.Frame, slots: list[Any], k: int
) -> list[Tensor]:
    it = iter(values)
    return [frame.lift([next(it) for _ in range(frame.width(s))], s, k) for s in slots]


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
