"""The forward: the function runs once, in the caller's levels and grad mode, and is recorded.

It runs on stand-ins, on a tape of its own, which is dropped when it has returned. What is left is
the results, and what a replay needs to know (`Region`). Then, from the lowest level that
differentiates anything, the results get one node a level (`node.attach`).
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from functx import _torch
from functx._policies import warn_of_unlisted_names
from functx._remat import leaving, levels, node, saving
from functx._remat.captures import Captures
from functx._remat.generators import Draws
from functx._remat.guard import StackGuard
from functx._remat.ledger import Record
from functx._remat.listener import Body, Listener, listening
from functx._remat.observers import observers
from functx._remat.plans import Follower
from functx._remat.region import Inputs, Options, Region
from functx._remat.writes import Writes
from functx._torch import graphs


class Forward:
    """One run of a region that is recorded."""

    # What a trace does differently (see `traced`):
    traces = False
    captures_of: Any = Captures
    writes_of: Any = Writes

    def __init__(self, region: Region, outer: Listener | None) -> None:
        self.region, self.outer = region, outer

    def run(self, body: Body, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        """The results on their nodes, and further ones with their numbers."""
        region, outer, options = self.region, self.outer, self.region.options
        region.frames = levels.frames() if _torch.peek_interpreter() is not None else []
        region.n_args, region.draws = len(tensors), None
        in_graph = _torch.tracing() and not self.traces
        if (options.preserve_rng_state or self.traces) and not in_graph:
            region.draws = Draws(python=options.preserve_rng_state == "all")
            region.draws.note_default(tensors)
        record = self.record = Record(region.draws, in_graph)
        inputs = self.inputs = Inputs(region.frames)
        if self.traces:
            inputs.lowest = 0
        else:
            record.saver = saving.saver_for(options.policy, in_graph)
        call = None if outer is None else outer.last[0]
        follows = record.saver is None and region.identity is not None and not self.traces
        kind = Follower if follows else self.captures_of
        captures = self.captures = kind(region, inputs, record, outer)
        for t in tensors:
            captures.admit(levels.alive(t))
        record.writes = self.writes_of(inputs, captures.made, region.title)
        captures.begin()
        _torch.push_function_mode(captures)
        mode = torch.is_grad_enabled()
        out = body(*inputs.standins)
        # A region may return with grad mode switched off, as any function may. What it has computed
        # keeps its history, so the engine goes on in the mode in which the region was called.
        left = torch.is_grad_enabled()
        if left is not mode:
            _torch.set_grad_enabled(mode)
        results = captures.finish(out)
        del out
        _torch.pop_function_mode()
        captures.end()
        if record.names and options.policy is not None:
            warn_of_unlisted_names(options.policy, record.names, region.title)
        results, places = _deduplicated(results)
        region.results = [places.index(i) for i in range(len(results))]
        if region.draws is not None:
            region.draws.end()
        if not region.frames and any(t.requires_grad for t in results):
            inputs.lowest = 0  # if only a leaf is differentiated that no mode has seen
        tensors = []
        further: list[tuple[int, Tensor]] = []
        if inputs.lowest <= len(region.frames):  # else nobody differentiates it
            results, further = self._finish(results)
        if call is not None:
            call.inner = captures.calls, captures.plan
        if left is not mode:
            _torch.set_grad_enabled(left)
        return [results[i] for i in places], further

    def _finish(self, results: list[Tensor]) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
        """Let go of the tape, and hang the results on nodes."""
        region, inputs, captures = self.region, self.inputs, self.captures
        writes = self.record.writes
        frames, n, lowest = region.frames, len(region.frames), inputs.lowest
        region.calls, region.slots = captures.calls, inputs.slots
        region.made, region.written = captures.made, writes.inputs_written()
        region.left_behind = captures.known
        # Level by level down to the lowest one that needs a node, ...
        parts, slots = {n: results}, {}
        for k in range(n, lowest, -1):
            parts[k - 1], slots[k] = frames[k - 1].lower_all(parts[k], k)
        leaves = captures.leaves_unseen([t for values in parts.values() for t in values])
        region.kept = saving.NOTHING
        captures.leave_out([*results, *parts[lowest]])
        kept = region.kept.take()
        writes.put_before()
        required = {k: _required(parts[k], k, inputs) for k in range(lowest, n + 1)}
        # ... and up again.
        fresh = [_off_the_tape(t, lowest) for t in parts[lowest]]
        region.further = []
        further: list[tuple[int, Tensor]] = []
        if n == 0:
            results.clear()
            parts.clear()
            further = leaving.further_results(captures, leaves)
            region.further = [number for number, _ in further]
            inputs.reached = None if further else inputs.reached
            fresh += [t for _, t in further]
            required[0] += [True] * len(further)
        made = self.record.has_made  # (nn.Parameter(...) is not shown: such a leaf is made anew)
        region.leaves = [ref(t) for t in leaves if not made(_torch.storage_of(t))]
        self.begin_up(fresh)
        for k in range(lowest, n + 1):
            if k > lowest:
                fresh = self.lift(frames[k - 1], fresh, slots[k], k)
            extra = leaves if k == 0 else []
            if (inputs.requiring(k) or extra) and True in required[k]:
                fresh = node.attach(
                    *(region, k, inputs, extra, fresh, required[k], kept),
                    captures.outer is None,
                )
        results.clear()
        parts.clear()
        if n:
            leaving.check_nothing_left(captures, fresh)
        if isinstance(captures, Follower):
            captures.make_plan(leaves)
        return fresh[: len(region.results)], further

    def begin_up(self, fresh: list[Tensor]) -> None:
        """These are the results at the lowest level, off the tape."""

    def lift(self, frame: levels.Frame, *args: Any) -> list[Tensor]:
        """Results one level up."""
        return frame.lift_all(*args)


def run(
    body: Body,
    again: Body,
    tensors: list[Tensor],
    options: Options,
    title: str,
    identity: Any = None,
    forward: Any = None,
) -> list[Tensor]:
    """Run ``body``, and remember how to run it ``again``; returns its results, on nodes.

    Both take ``tensors`` and return tensors. A plan is found by the ``identity`` of the function.
    ``forward`` makes a `Forward` of the region and the listener around; if ``None``, what traces
    here does, or that itself.
    """
    if forward is None and observers.tracers:
        return observers.tracers[-1](body, again, tensors, options, title, identity)
    outer = listening()
    if outer is not None:
        tensors = outer.take(options.name, tensors)
        call, due = outer.last
    # (After they were taken in: objects may be others in a replay.)
    tensors, places = _deduplicated(tensors)
    if len(tensors) < len(places):
        body, again = _given_each_once(body, places), _given_each_once(again, places)
    with StackGuard(outer) as entry:
        entry.stop_caching(entry.settings)
        entry.take_hooks()
        entry.take_norms()
        region = Region()
        region.title, region.identity, region.body = title, identity, again
        region.options, region.settings = options, entry.settings
        since = graphs.last_node()
        results, further = (forward or Forward)(region, outer).run(body, tensors)
        graphs.close(since, options.name, "forward")
        if entry.norms is not None:  # here, lest an interrupt comes before its exit has begun
            _torch.push_function_mode(entry.norms)
            entry.norms = None
    if outer is not None:
        outer.last = call, due if outer.expected else None  # it may have left its plan by now
        outer.give(results)
        outer.give_further(further)
    return results


def _deduplicated(tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Each tensor once, and for all of them which of these it is."""
    different = {id(t): t for t in tensors}
    numbers = {key: number for number, key in enumerate(different)}
    return [*different.values()], [numbers[id(t)] for t in tensors]


def _given_each_once(body: Body, places: list[int]) -> Body:
    """A body that is given each tensor once."""
    return lambda *ts: body(*[ts[i] for i in places])


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
    return _torch.wrap_grad(_torch.unwrap_grad(t, k), k) if _torch.level_of(t) == k else t
