"""The forward: the function runs once, in the caller's levels and grad mode.

It runs on stand-ins, so it has a separate tape, which is dropped when the function has returned.
Either the run is recorded (`captures`), or it follows the script of an earlier run (NOTE [two
speeds]). It leaves the results, and a `Region` with all that a replay needs. Then, from the lowest
level that differentiates anything upwards, the results get one node for each level (`node.attach`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from functx import _torch
from functx._core import tree
from functx._policies import warn_of_unlisted_names
from functx._remat import leaving, levels, node, runs, saving, script
from functx._remat.calls import CAPTURE, DATA
from functx._remat.captures import Captures
from functx._remat.follow import ForwardFollower, StartOver
from functx._remat.generators import Draws
from functx._remat.guard import StackGuard
from functx._remat.ledger import Record
from functx._remat.listener import Body, Listening, listening
from functx._remat.observers import observers
from functx._remat.region import NEVER, Inputs, Options, Region
from functx._remat.script import Partly, Script
from functx._remat.writes import Writes
from functx._torch import graphs


class Forward:
    """A run of a region that is recorded, from its first call or from the call that departed."""

    # A trace overrides these (see `traced`):
    traces = False
    captures_of: Any = Captures
    writes_of: Any = Writes

    writes: Any  # the writes to memory of inputs
    listener: Captures  # the recorder of the region's calls

    def __init__(
        self,
        region: Region,
        outer: Listening | None,
        function: Any,
        inputs: Inputs,
        key: Any,
        first_node: int,
    ) -> None:
        self.region, self.outer, self.function = region, outer, function
        self.inputs, self.key, self.first_node = inputs, key, first_node
        self.in_graph = _torch.tracing() and not self.traces

    def run(self, body: Body, tensors: list[Tensor]) -> tuple[list[Tensor], Any, Any]:
        """Run the body.

        Returns:
            The results on their nodes, further results with their numbers, and the structure of
            the results, from which `tree.combine` builds the pytree again.
        """
        captures = self.listener = self.recorder()
        if not self.inputs.standins:  # otherwise the inputs are already admitted
            for t in tensors:
                captures.admit(levels.alive(t))
            t = None  # type: ignore[assignment]
        tensors.clear()
        captures.begin()
        _torch.push_function_mode(captures)
        mode = torch.is_grad_enabled()
        out = body(*self.inputs.standins)
        # Like any function, a region may return with grad mode switched off. Its results keep their
        # history, so the engine goes on in the grad mode in which the region was called.
        left = torch.is_grad_enabled()
        if left is not mode:
            _torch.set_grad_enabled(mode)
        out, how = tree.partition(out)
        results, further = self.complete(out)
        if left is not mode:
            _torch.set_grad_enabled(left)
        return results, further, how

    def complete(self, out: list[Tensor]) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
        """The results on their nodes, and further results, after the code has returned ``out``."""
        region, inputs, captures = self.region, self.inputs, self.listener
        results = captures.finish(out)
        _torch.pop_function_mode()
        captures.end()
        policy = region.options.policy
        if captures.record.names and policy is not None:
            warn_of_unlisted_names(policy, captures.record.names, region.title)
        results, self.places = _deduplicated(results)
        self.results = [self.places.index(i) for i in range(len(results))]
        out.clear()
        if region.draws is not None:
            region.draws = region.draws.ended()
        n = len(region.frames)
        if not n and any(t.requires_grad for t in results):
            inputs.lowest = 0  # (this decides if the only input to differentiate is an unseen leaf)
        further: list[tuple[int, Tensor]] = []
        nodes = _torch.next_sequence_number() - self.first_node - inputs.nodes
        if inputs.lowest <= n:
            results, further = self.finish(results, nodes)
        elif self.key is not None:  # neither this run nor later runs of this key are differentiated
            self.leave_script(self.told(captures.leave_out(results), nodes))
        return [results[i] for i in self.places], further

    def recorder(self) -> Captures:
        """The recorder of the run, with its ledger."""
        region, inputs = self.region, self.inputs
        record = Record(region.draws, self.in_graph)
        if self.traces:
            inputs.lowest = 0
        elif self.key is None:
            record.saver = saving.saver_for(region.options.policy, self.in_graph)
        captures: Captures = self.captures_of(region, inputs, record, self.outer, self.first_node)
        record.writes = self.writes_of(inputs, captures.made, region.title)
        return captures

    # -- the end: drop the tape, and attach the results to nodes

    def finish(
        self, results: list[Tensor], nodes: int
    ) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
        """The results on nodes, level by level, and further results."""
        region, inputs, captures = self.region, self.inputs, self.listener
        frames, n, lowest = region.frames, len(region.frames), inputs.lowest
        # Level by level down to the lowest one that needs a node, ...
        parts, slots = {n: results}, {}
        for k in range(n, lowest, -1):
            parts[k - 1], slots[k] = frames[k - 1].lower_all(parts[k], k)
        leaves = captures.leaves_unseen([t for values in parts.values() for t in values])
        ran = captures.leave_out([*results, *parts[lowest]])
        kept = [] if region.kept is None else region.kept.take()
        self.writes = captures.record.writes
        region.written = self.writes.inputs_written()
        self.writes.put_before()
        required = {k: node.required_of(parts[k], k, inputs) for k in range(lowest, n + 1)}
        told = self.told(ran, nodes)
        region.slots = inputs.slots
        region.left_behind = [known for known, number in captures.known.values() if number > 0]
        # ... and up again.
        fresh = [node.off_the_tape(t, lowest) for t in parts[lowest]]
        results.clear()
        parts.clear()
        n_results, further = len(fresh), list[tuple[int, Tensor]]()
        if n == 0 and (further := leaving.further_results(captures, leaves)):
            region.further = [number for number, _ in further]
            inputs.reached = None  # the inputs that these depend on are not known
            fresh += [t for _, t in further]
            required[0] += [True] * len(further)
        # No mode sees nn.Parameter(...). A replay makes another such leaf, so it isn't compared.
        has_made = captures.record.has_made
        region.leaves = [ref(t) for t in leaves if not has_made(_torch.storage_of(t))]
        self.begin_up(fresh)
        for k in range(lowest, n + 1):
            if k > lowest:
                fresh = self.lift(frames[k - 1], fresh, slots[k], k)
            extra = [] if k else leaves
            if True in required[k] and ((requiring := inputs.requiring(k)) or extra):
                args = region, k, inputs.values[k], requiring, extra, fresh, required[k], kept
                fresh = node.attach(*args, inputs=inputs, outermost=self.outer is None)
        if n:
            leaving.check_nothing_left(captures, fresh)
        if leaves:
            told.untold = "a leaf that no mode sees"
        elif further:
            told.untold = "a tensor that leaves without being returned"
        self.leave_script(told)
        return fresh[:n_results], further

    def told(self, ran: Any, nodes: int) -> Script:
        """The script of this run."""
        region, inputs, captures = self.region, self.inputs, self.listener
        told = region.script = Script()
        told.calls, told.key, told.kinds = captures.calls, self.key, inputs.kinds
        told.made, told.results, told.places = captures.made, self.results, self.places
        told.ran, told.nodes, told.serial, told.slots = ran, nodes, captures.serial, inputs.slots
        told.partly = Partly.YES if captures.record.followed else Partly.NO
        # (On which inputs a gradient depends may be decided by a hook, in each run anew.)
        requiring = inputs.leaves_at if region.options.is_pullback else inputs.requiring
        told.requiring = [requiring(k) for k in range(len(region.frames) + 1)]
        told.steps, told.has_leaves_asked, told.pullbacks = (), False, {}
        told.untold = script.untold_in(told.calls, region.options.is_pullback) or captures.hides
        told.before = None
        if any(call.inner is not None for call in told.calls):
            told.before = [*captures.before, len(captures.record.starts) - 1]
        told.stop = ran.left_out - 1
        if told.before is not None and ran.left_out != NEVER:
            told.stop = bisect_right(told.before, told.stop) - 1
            # The ledger can't begin at a capture: a region inside may be running then.
            while told.calls[told.stop].func in (CAPTURE, DATA):
                told.stop -= 1
        return told

    def leave_script(self, told: Script) -> None:
        """Let later runs follow the script, if the log shows all effects of the run.

        A run inside of a replay of an enclosing region leaves no script: the forward that it
        repeats has left one.
        """
        if not told.untold and self.key is not None and self.listener.expected is None:
            told.steps = [*map(script.step_of, told.calls)]
            self.region.scripts.add(told, self.function)

    def begin_up(self, fresh: list[Tensor]) -> None:
        """Begin with the results at the lowest level, off the tape. A trace overrides this."""

    def lift(self, frame: levels.Frame, *args: Any) -> list[Tensor]:
        """The results one level up."""
        return frame.lift_all(*args)


def run(
    body: Body,
    again: Body,
    tensors: list[Tensor],
    options: Options,
    title: Any,
    function: Any = None,
    scripts: Any = None,
    cells: Any = None,
    forward: Any = None,
) -> Any:
    """Run ``body``, and remember how to run it ``again``; returns its results, on nodes.

    Both take ``tensors`` and return a pytree.

    Args:
        body: The function; it runs now.
        again: The same function for replays, with copies of the closure cells.
        tensors: The inputs so far.
        options: The options of the user.
        title: The name of the region in messages.
        function: The user's function; its later runs may follow the script of this run.
        scripts: The scripts of earlier runs. If ``None``, each run is recorded.
        cells: The cells that ``again`` closes over; see `cells`.
        forward: Makes a `Forward`. If ``None``, an active tracer does that, or `Forward` itself.
    """
    if forward is None and observers.tracers:
        return observers.tracers[-1](body, again, tensors, options, title, function, scripts, cells)
    outer = listening() if _torch.function_depth() else None
    around, mark, log_inside = None, -1, None
    if outer is not None:
        tensors = outer.take(options.name, tensors)
        around = outer = outer.listener()
        mark, log_inside = outer.mark(), outer.log_inside()
    # (After `take`, which returns stand-ins: two tensors of user code may be the same input.)
    if len(tensors) > 1:
        tensors, places = _deduplicated(tensors)
        if len(tensors) < len(places):
            body, again = _given_each_once(body, places), _given_each_once(again, places)
    entry = StackGuard(outer)
    try:
        settings, in_modes = entry.settings, entry.dispatch > 0
        if settings.caches:
            entry.stop_caching()
        if _torch.top_saved_tensor_hooks(True) is not None:
            entry.take_hooks()
        if entry.function:
            entry.take_norms()
        region = Region()
        region.title, region.options, region.settings = title, options, settings
        region.body, region.cells, region.scripts = again, cells, scripts
        region.n_args, first_node = len(tensors), _torch.next_sequence_number()
        if entry.functorch:
            region.frames = levels.frames()
        inputs = key = follower = log = None
        further: Sequence[tuple[int, Tensor]] = ()
        if (
            options.follows
            and scripts is not None
            and forward is None
            and not (in_modes and (_torch.tracing() or saving.is_kept_around()))
        ):
            kinds: list[Any] = []
            if region.frames:
                inputs = Inputs(region.frames)
                for t in tensors:
                    inputs.admit(levels.alive(t))
                kinds += inputs.kinds
            else:
                for i, t in enumerate(tensors):
                    if _torch.unwrap_if_dead(t) is not t:
                        tensors[i] = t = levels.alive(t)
                    kinds.append((t.shape, t.dtype, t.device, t.requires_grad))
            key = key_of(region, kinds)
            own = scripts.own
            fitting = own[0] if own and own[0].key == key else scripts.first_fitting(key, function)
            if log_inside is not None and fitting is not None and fitting.calls is not log_inside:
                fitting = scripts.with_log(key, function, log_inside)
            if fitting is not None and fitting.partly is Partly.AND_FOLLOWED:
                fitting.partly = Partly.NO
            elif fitting is not None:
                args = region, inputs, tensors, fitting, function, entry, first_node, outer
                follower = ForwardFollower(*args)
        if follower is None and isinstance(outer, ForwardFollower):
            outer = outer.hand_over()  # first: its ledger must lie below
            entry.outer, entry.dispatch, in_modes = outer, _torch.dispatch_depth(), True
        since = graphs.last_node() if in_modes else None
        if follower is not None:
            del tensors
            if options.preserve_rng_state:
                python = options.preserve_rng_state == "all"
                region.draws = Draws(follower.standins, python=python)
            try:
                how, results = follower.run(body)
            except StartOver:
                entry.cut_back()
                inputs, follower = follower.all_inputs(), None
                tensors = [*inputs.standins]
        if follower is not None:
            if follower.heir is not None:  # the run has departed from the script
                inputs, outer = follower.all_inputs(), follower.outer
                goes_on = Forward(region, outer, function, inputs, key, first_node)
                log = goes_on.listener = follower.heir
                results, further = goes_on.complete(results)
            elif not (scripts.own and scripts.own[0] is follower.script):
                scripts.followed(follower.script)
            further = further or follower.further
            if not follower.leaves_grad_mode:
                _torch.set_grad_enabled(False)
        else:
            traces = forward is not None and forward is not Forward
            in_graph = in_modes and not traces and _torch.tracing()
            if (options.preserve_rng_state or traces) and not in_graph:
                region.draws = Draws(tensors, python=options.preserve_rng_state == "all")
            inputs = inputs or Inputs(region.frames)
            one = (forward or Forward)(region, outer, function, inputs, key, first_node)
            given, tensors = tensors, []
            results, further, how = one.run(body, given)
            log = one.listener
        if in_modes:
            graphs.close(since, options.name, "forward")
        if entry.norms is not None:  # here, because an interrupt could come before the exit begins
            _torch.push_function_mode(entry.norms)
            entry.norms = None
    except BaseException:
        entry.failed()
        raise
    finally:
        if entry.took:
            entry.end()
        if around is not None:
            around.inside = None
    if outer is not None:
        outer = outer.listener()
        outer.resume(mark)
        outer.set_aside(_torch.next_sequence_number() - first_node)
        if log is None:
            assert follower is not None
            outer.note_inside(follower.calls_made())
        else:
            outer.note_inside(log.calls)
            if not (hasattr(region, "script") and region.script.steps):
                outer.hide("a region inside that no later run follows")
        outer.give(results)
        outer.give_further([*further])
    if observers.of_runs:
        said = runs.how_it_ran(region, function, follower, key)
        for callback in observers.of_runs:
            callback(options.name, said)
    return results[0] if how is None else tree.combine(results, how)


def key_of(region: Region, kinds: list[Any]) -> Any:
    """The key of a run: runs may share a script only if their keys are equal."""
    options, frames = region.options, region.frames
    said = options.early_stop, options.preserve_rng_state, region.settings.norms
    return said, [(f.kind, f.size, f.randomness) for f in frames] if frames else (), kinds


def _deduplicated(tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The distinct tensors, and for each of ``tensors`` its index among them."""
    different = {id(t): t for t in tensors}
    numbers = {key: number for number, key in enumerate(different)}
    return [*different.values()], [numbers[id(t)] for t in tensors]


def _given_each_once(body: Body, places: list[int]) -> Body:
    """The body as a function of the distinct tensors."""
    return lambda *ts: body(*[ts[i] for i in places])
