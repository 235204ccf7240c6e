"""The forward: the function runs once, in the caller's levels and grad mode.

It runs on stand-ins, on a tape of its own, which is dropped when it has returned. Either it is
recorded (`captures`), or it follows the script of an earlier run (NOTE [two speeds]). What is left
is the results, and what a replay needs to know (`Region`). Then, from the lowest level that
differentiates anything, the results get one node a level (`node.attach`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from functx import _torch
from functx._core import tree
from functx._policies import warn_of_unlisted_names
from functx._remat import leaving, levels, node, saving, script
from functx._remat.captures import Captures
from functx._remat.forward_follower import ForwardFollower
from functx._remat.generators import Draws
from functx._remat.guard import StackGuard
from functx._remat.ledger import Record, ledgers
from functx._remat.listener import Body, Listener, listening
from functx._remat.observers import observers
from functx._remat.region import Inputs, Options, Region
from functx._remat.script import Partly, Script
from functx._remat.writes import Writes
from functx._torch import graphs


class Forward:
    """One run of a region."""

    # What a trace does differently (see `traced`):
    traces = False
    captures_of: Any = Captures
    writes_of: Any = Writes

    writes: Writes  # to the inputs' memory
    listener: ForwardFollower | Captures  # to the region's calls

    def __init__(self, region: Region, outer: Listener | None, function: Any) -> None:
        self.region, self.outer, self.function = region, outer, function

    def run(self, body: Body, tensors: list[Tensor]) -> tuple[list[Tensor], Any, Any]:
        """The results on their nodes, further ones with their numbers, and how the first were.

        (They were a tree, which `tree.combine` puts together again.)
        """
        region, outer, options = self.region, self.outer, self.region.options
        around = None if outer is None else outer.last[0]  # this call, in the log around
        region.n_args = len(tensors)
        if _torch.peek_interpreter() is not None:
            region.frames = levels.frames()
        self.in_graph = _torch.tracing() and not self.traces
        if (options.preserve_rng_state or self.traces) and not self.in_graph:
            region.draws = Draws(python=options.preserve_rng_state == "all")
            region.draws.note_default(tensors)
        inputs = self.inputs = Inputs(region.frames)
        self.first_node = _torch.next_sequence_number()
        self.key = self.key_of(tensors)
        listener = self.listener = self.listener_for(tensors)
        _torch.push_function_mode(listener)
        mode = torch.is_grad_enabled()
        out = body(*inputs.standins)
        # A region may return with grad mode switched off, as any function may. What it has computed
        # keeps its history, so the engine goes on in the mode in which the region was called.
        left = torch.is_grad_enabled()
        if left is not mode:
            _torch.set_grad_enabled(mode)
        out, how = ([out], None) if type(out) is Tensor else tree.partition(out)
        results, places = self.results_of(out)
        del out
        if region.draws is not None:
            region.draws.end()
        n = len(region.frames)
        if not n and inputs.lowest and any([t.requires_grad for t in results]):
            inputs.lowest = 0  # only a leaf is differentiated that no mode has seen
        tensors = []
        further: list[tuple[int, Tensor]] = []
        if inputs.lowest <= n:  # else nobody differentiates it
            results, further = self.finish_in_levels(results) if n else self.finish(results)
        if around is not None:
            around.inner = self.listener.calls
        if left is not mode:
            _torch.set_grad_enabled(left)
        return [results[i] for i in places], further, how

    def results_of(self, out: list[Tensor]) -> tuple[list[Tensor], list[int]]:
        """The code has returned: its results, each once, and which of these each of them is."""
        results = None
        if isinstance(self.listener, ForwardFollower):
            if self.listener.heir is None:
                results = self.listener.returns(out)
            if results is None:
                self.listener = self.listener.listener()
        if results is None:
            results = self.listener.finish(out)
        _torch.pop_function_mode()
        if isinstance(self.listener, ForwardFollower):
            told = self.listener.script
            self.results, self.places = told.results, told.places
            if len(told.results) < len(results):
                results = [results[i] for i in told.results]
        else:
            self.listener.end()
            self.warn_of_names(self.listener.record)
            results, self.places = _deduplicated(results)
            self.results = [self.places.index(i) for i in range(len(results))]
        return results, self.places

    # -- the two speeds

    def key_of(self, tensors: list[Tensor]) -> Any:
        """What runs of one script have in common; ``None`` for a run that is recorded anyhow.

        The inputs are admitted, if it is not ``None``.
        """
        options = self.region.options
        if (
            self.region.scripts is None
            or self.outer is not None
            or self.traces
            or options.policy is not None
            or options.determinism_check == "none"
            or (_torch.dispatch_depth() and (_torch.tracing() or ledgers()))
        ):
            return None
        inputs, frames = self.inputs, self.region.frames
        for t in tensors:
            inputs.admit(levels.alive(t))
        return (
            (options.early_stop, options.preserve_rng_state, self.region.settings.norms),
            tuple([(f.kind, f.size, f.randomness) for f in frames]) if frames else (),
            tuple(inputs.kinds),
        )

    def listener_for(self, tensors: list[Tensor]) -> ForwardFollower | Captures:
        """What follows an earlier run, if there was one with such arguments; or records this one."""
        region, inputs = self.region, self.inputs
        if self.key is not None:
            fitting = region.scripts.fitting(self.key, self.function)
            if fitting and fitting[0].partly is not Partly.AND_FOLLOWED:
                return ForwardFollower(region, inputs, fitting, self.first_node)
            if fitting:
                fitting[0].partly = Partly.NO
        captures = self.recorder()
        if self.key is None:  # else they are admitted
            for t in tensors:
                captures.admit(levels.alive(t))
        captures.begin()
        return captures

    def recorder(self) -> Captures:
        """What records the run."""
        region, inputs = self.region, self.inputs
        record = Record(region.draws, self.in_graph)
        if self.traces:
            inputs.lowest = 0
        elif self.key is None:
            record.saver = saving.saver_for(region.options.policy, self.in_graph)
        captures = self.captures_of(region, inputs, record, self.outer, self.first_node)
        record.writes = self.writes_of(inputs, captures.made, region.title)
        return captures  # type: ignore[no-any-return]

    def warn_of_names(self, record: Record) -> None:
        """Warn of names that the policy does not list."""
        policy = self.region.options.policy
        if record.names and policy is not None:
            warn_of_unlisted_names(policy, record.names, self.region.title)

    # -- the end: let go of the tape, and hang the results on nodes

    def finish(self, results: list[Tensor]) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
        """The results at the base level, and further ones."""
        region, inputs = self.region, self.inputs
        leaves = self.told(results, results)
        kept = [] if region.kept is None else region.kept.take()
        required, fresh = [], []
        for t in results:
            required.append(t.requires_grad and (t.grad_fn is not None or id(t) in inputs.leaves))
            fresh.append(_off_the_tape(t))
        del t
        results.clear()
        n_results, further = len(fresh), self.further_results(leaves)
        if further:
            region.further = [number for number, _ in further]
            inputs.reached = None  # of these nothing is known
            fresh += [t for _, t in further]
            required += [True] * len(further)
        if self.traces:
            self.begin_up(fresh)
        fresh = self.attached(0, fresh, required, leaves, kept)
        if not (leaves or further):
            self.leave_script()
        return fresh[:n_results], further

    def finish_in_levels(self, results: list[Tensor]) -> tuple[list[Tensor], Any]:
        """The results, inside of transforms; no further ones."""
        region, inputs = self.region, self.inputs
        frames, n, lowest = region.frames, len(region.frames), inputs.lowest
        # Level by level down to the lowest one that needs a node, ...
        parts, slots = {n: results}, {}
        for k in range(n, lowest, -1):
            parts[k - 1], slots[k] = frames[k - 1].lower_all(parts[k], k)
        every = [t for values in parts.values() for t in values]
        leaves = self.told(every, [*results, *parts[lowest]])
        del every
        kept = [] if region.kept is None else region.kept.take()
        required = {k: _required(parts[k], k, inputs) for k in range(lowest, n + 1)}
        # ... and up again.
        fresh = [_off_the_tape(t, lowest) for t in parts[lowest]]
        if self.traces:
            self.begin_up(fresh)
        for k in range(lowest, n + 1):
            if k > lowest:
                fresh = self.lift(frames[k - 1], fresh, slots[k], k)
            fresh = self.attached(k, fresh, required[k], [] if k else leaves, kept)
        results.clear()
        parts.clear()
        self._check_nothing_left(fresh)
        if not leaves:
            self.leave_script()
        return fresh, []

    def attached(
        self, k: int, fresh: list[Tensor], required: list[bool], leaves: list[Tensor], kept: Any
    ) -> list[Tensor]:
        """The results at level k on their node, if they need one there."""
        if True not in required:
            return fresh
        requiring = self.inputs.requiring(k)
        if not (requiring or leaves):
            return fresh
        if observers.of_nodes and self.outer is None:
            for callback in observers.of_nodes:
                callback([*self.inputs.values[k]], self.region.options.name, k)
        return node.attach(self.region, k, self.inputs, requiring, leaves, fresh, required, kept)

    def _recorder_now(self) -> Captures:
        """What has recorded the run; if it has followed a script to its end, what goes on."""
        if isinstance(self.listener, ForwardFollower):
            self.listener = self.listener.hand_over()
            self.listener.end()
        return self.listener

    def told(self, every: list[Tensor], results: list[Tensor]) -> list[Tensor]:
        """Note what the run has told. Returns leaves on the tape that no mode has seen.

        Args:
            every: the results at all levels.
            results: those of the body, and at the lowest level.
        """
        region, listener, inputs = self.region, self.listener, self.inputs
        self.nodes = _torch.next_sequence_number() - self.first_node
        region.slots = inputs.slots
        if type(listener) is ForwardFollower:
            region.script, region.changed = listener.script, listener.changed
            if listener.writes is not None:
                self.put_before(listener.writes)
            if listener.script.nodes == self.nodes:
                region.left_behind = listener.refs
                inputs.reached = listener.script.reached
                return []
        captures = self._recorder_now()
        leaves = captures.leaves_unseen(every)
        told = region.script = Script()
        told.ran = captures.leave_out(results)
        if region.written == ():
            self.put_before(captures.record.writes)
        told.calls, told.key, told.kinds = captures.calls, self.key, inputs.kinds
        told.made, told.results, told.places = captures.made, self.results, self.places
        told.nodes, told.serial, told.reached = self.nodes, captures.serial, inputs.reached
        told.partly = Partly.YES if captures.record.followed else Partly.NO
        told.steps = None
        region.left_behind = [known for known, number in captures.known.values() if number > 0]
        return leaves

    def put_before(self, writes: Writes) -> None:
        """The region keeps its inputs as they were before it wrote to them."""
        self.writes, self.region.written = writes, writes.inputs_written()
        if self.region.written:
            writes.put_before()

    def leave_script(self) -> None:
        """Later runs may follow the script of this one, if its calls tell all."""
        region, told = self.region, self.region.script
        is_new = told.steps is None
        if is_new:
            hides = self.key is None or self.listener.hides
            if hides or not script.tell_all(told.calls):
                return
            told.steps = [*map(script.step_of, told.calls)]
        elif told.partly is Partly.YES and getattr(self.listener, "follows_whole", False):
            told.partly = Partly.AND_FOLLOWED
        region.scripts.put_first(told, self.function, is_new=is_new)

    def further_results(self, leaves: list[Tensor]) -> list[tuple[int, Tensor]]:
        """What is alive and requires grad, and was not returned."""
        listener = self.listener
        if isinstance(listener, ForwardFollower) and not listener.leaves_something(()):
            return []
        return leaving.further_results(self._recorder_now(), leaves)

    def _check_nothing_left(self, results: list[Tensor]) -> None:
        """Inside of transforms, nothing that requires grad may be alive."""
        listener = self.listener
        if isinstance(listener, ForwardFollower) and not listener.leaves_something(results):
            return
        leaving.check_nothing_left(self._recorder_now(), results)

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
    title: Any,
    function: Any = None,
    scripts: Any = None,
    forward: Any = None,
) -> Any:
    """Run ``body``, and remember how to run it ``again``; returns its results, on nodes.

    Both take ``tensors``, and return what a tree holds. Later runs find the script of this one in
    ``scripts``, or by the ``function``; each run is recorded where ``scripts`` is ``None``.
    ``forward`` makes a `Forward` of the region and the listener around; if ``None``, what traces
    here does, or that itself.
    """
    if forward is None and observers.tracers:
        return observers.tracers[-1](body, again, tensors, options, title, function, scripts)
    outer = listening()
    if outer is not None:
        tensors = outer.take(options.name, tensors)
        call, due = outer.last
    # (After they were taken in: objects may be others in a replay.)
    if len(tensors) > 1:
        tensors, places = _deduplicated(tensors)
        if len(tensors) < len(places):
            body, again = _given_each_once(body, places), _given_each_once(again, places)
    with StackGuard(outer) as entry:
        if entry.settings.caches:
            entry.stop_caching()
        if _torch.top_saved_tensor_hooks(True) is not None:
            entry.take_hooks()
        if entry.function:
            entry.take_norms()
        region = Region()
        region.title, region.scripts, region.body = title, scripts, again
        region.options, region.settings = options, entry.settings
        since = graphs.last_node() if entry.dispatch else None
        results, further, how = (forward or Forward)(region, outer, function).run(body, tensors)
        if entry.dispatch:
            graphs.close(since, options.name, "forward")
        if entry.norms is not None:  # here, lest an interrupt comes before its exit has begun
            _torch.push_function_mode(entry.norms)
            entry.norms = None
    if outer is not None:
        outer.last = call, due
        outer.give(results)
        outer.give_further(further)
    return tree.combine(results, how)


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


def _off_the_tape(t: Tensor, k: int = 0) -> Tensor:
    """A result that its tape does not know."""
    if k == 0:
        if _torch.dual_level() >= 0 and fwAD.unpack_dual(t).tangent is not None:
            raise AssertionError("functx: a dual of plain forward mode at the base level")
        return levels.detached(t)
    return _torch.wrap_grad(_torch.unwrap_grad(t, k), k) if _torch.level_of(t) == k else t
