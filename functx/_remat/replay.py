"""A replay: the region runs again from the inputs that a node saved, on a new tape.

The replay cuts the stack of levels to the depth of its inputs, and enters new levels for those of
the forward that are above. It has left them when it returns. Only then the pullback is called. So
levels that have ended record nothing, and levels that are still active record what they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._core import ReplayError, function_classes, tree, unwrap_for_backward
from functx._remat import departures, levels, sharding
from functx._remat.calls import DATA, RETURN, Call
from functx._remat.captures import tape_of
from functx._remat.follow import Differs, Follower
from functx._remat.generators import Restored
from functx._remat.guard import StackGuard
from functx._remat.ledger import BeginAgain, Record, Rerun, is_left_out, ledgers
from functx._remat.listener import Listener, listening
from functx._remat.observers import observers
from functx._remat.region import NEVER, Region
from functx._remat.script import NO_STEP, step_of
from functx._remat.writes import copied
from functx._torch import graphs


class Replayer(Listener):
    """Compares a replay with the log of the forward.

    Its ledger begins to listen at the first call that leaves an operation out.
    """

    def __init__(self, region: Region, late: LateLedger, standins: list[Tensor]) -> None:
        super().__init__(region, standins, (), region.calls())
        self.late = late
        self.wanted = dict.fromkeys(region.further)

    def watch(self) -> None:
        """Let the ledger listen."""
        self.ledgers = (self.late.begin(self.at),)

    def log(self, call: Call) -> Call | None:
        if not self.ledgers and self.late.stop < NEVER - 1:
            # (A region inside does not notify this listener of each call, so begin before it.)
            inside = isinstance(call.func, str) and call.func not in (RETURN, DATA)
            if (inside or self.at >= self.late.stop) and self.late.may_begin():
                self.watch()
        return super().log(call)

    def left(self, number: int) -> Tensor:
        """A tensor that left the forward without being returned."""
        t = self.standins[-1 - number] if number < 0 else self.wanted[number]
        if t is None:
            raise departures.not_left(self.region)
        return t


class ReplayFollower(Follower):
    """Compares a replay with the script that its forward has made or followed."""

    is_replayed = True

    def __init__(self, region: Region, late: LateLedger, standins: list[Tensor]) -> None:
        script = region.script
        self.region, self.n_args, self.norms = region, region.n_args, region.settings.norms
        self.script, self.steps, self.standins = script, script.steps, standins
        self.refs, self.numbers = [None] * (script.serial + 1), {}
        self.late, self.stop, self.depth = late, script.stop, _torch.functorch_depth()
        if region.changed:
            self.steps = [*self.steps]
            for i, call in region.changed.items():
                self.steps[i] = step_of(call)
        self.due, self.modes = self.steps[0], late.here[0]

    def watch(self) -> None:
        if self.inside is None and self.late.may_begin():
            self.ledger, self.stop = self.late.begin(self.calls_before()), NEVER

    def standin_for(self, t: Tensor, number: int) -> Tensor:
        # (See NOTE [by place].)
        if -1 - number < self.n_args or _torch.level_of(t) > 0 or self.is_result(t):
            raise Differs
        if _torch.unwrap_if_dead(t) is not t:
            raise Differs
        return self.standins[-1 - number]

    def keep_as(self, make: Any, due: Call) -> Tensor:
        self.advance()
        return self.standins[due.kept]  # type: ignore[index]

    def calls_made(self) -> list[Call]:
        return self.region.calls()[: self.at]

    def hand_over(self) -> Replayer:
        heir = self.heir = Replayer(self.region, self.late, self.standins)
        self.due = NO_STEP
        heir.take_over(self)
        if self.ledger is not None:
            heir.ledgers = (self.ledger,)
        elif self.region.draws is not None and self.open < 0:
            heir.watch()
        if self.open >= 0:
            heir.resume(self.open)
        heir.asleep, self.asleep = self.asleep, False
        return heir


class LateLedger:
    """Makes the ledger of a replay when it must begin to listen.

    This is at the first call that leaves an operation out.
    """

    __slots__ = ("begun", "here", "kept", "live", "region", "stop")

    def __init__(self, region: Region, live: Any, kept: Sequence[Tensor]) -> None:
        self.region, self.live, self.kept = region, live, kept
        self.stop = region.script.ran.left_out - 1
        self.here = _torch.dispatch_depth(), _torch.current_backward()
        self.begun: Rerun | None = None

    def may_begin(self) -> bool:
        """Whether the same modes and the same backward pass are active as at the start."""
        return self.here == (_torch.dispatch_depth(), _torch.current_backward())

    def begin(self, at: int) -> Rerun:
        """Make the ledger and let it listen, after ``at`` calls."""
        region = self.region
        kept = {} if region.kept is None else region.kept.given(self.kept)
        rerun = self.begun = Rerun(region.script.ran, self.live, kept, at)
        if region.draws is not None:
            rerun.draws_again = True
        _torch.push_dispatch_mode(rerun)
        return rerun

    def end(self) -> None:
        """Stop listening: the region's code has returned."""
        if self.begun is not None and _torch.pop_dispatch_mode(None) is not self.begun:
            raise AssertionError("functx: a dispatch mode was left behind")
        if self.region.kept is not None:
            self.region.kept.end()


_OF_WRONG_SHAPES = {ReplayError, RuntimeError, IndexError}


def replay(
    region: Region,
    level: int,
    values: list[Tensor],
    kept: Sequence[Tensor],
    wanted: list[int] | None,
) -> tuple[list[Any], list[Tensor]]:
    """Run ``region`` again from its values at one level.

    Returns:
        For each result in ``wanted`` its gradient edge (``None`` if it has no tape), and the leaves
        made of the values. If ``wanted`` is ``None``, all results at that level and the inputs that
        were written, in place of edges; then nothing is left out.
    """
    entry = StackGuard(listening() if _torch.function_depth() else None)
    try:
        if entry.function:
            entry.take_norms()
        depth = 0
        if entry.functorch:
            depth = min(max(level - 1, 0, *map(_torch.level_of, values)), entry.functorch)
        if region.draws is not None:
            _tell_of_draws(region)
            entry.restored, entry.took = Restored(region.draws), True
            entry.restored.begin()
        modes: Sequence[Any] = ()
        if region.settings != entry.settings:
            region.settings.put(entry.settings)
            modes = region.settings.modes(entry.settings)
        if region.settings.caches:
            entry.stop_caching()
        for mode in modes:
            _torch.push_function_mode(mode)
        if region.frames or wanted is None or entry.functorch:
            attempt = partial(_attempt, region, level, values, kept, wanted)
        else:
            attempt = partial(_attempt_at_the_base, region, values, kept, wanted)
        if depth < entry.functorch:
            attempt = partial(_at_depth, depth, attempt)
        if observers.of_replays and wanted is not None:
            attempt = partial(_observed, region.options.name, attempt)
        try:
            result = attempt(None if wanted is None else region.script.ran.live)
        except (BeginAgain, Exception) as error:
            # If operations were mistaken for others, memory of a wrong shape stands in for what is
            # left out. Then a call departs, or torch raises an error. So such an error counts only
            # if the replay raises it without leaving anything out.
            mistaken = type(error) in _OF_WRONG_SHAPES and is_left_out()
            if not (mistaken or isinstance(error, BeginAgain)):
                raise
            entry.cut_back(modes=len(modes))
            if entry.restored is not None:
                entry.restored.rewind()
            result = attempt(None)
        for _ in modes:
            _torch.pop_function_mode()
        if region.settings != entry.settings:
            entry.settings.put(region.settings)
        if region.frames:
            entry.settle()
        drawn = None if entry.restored is None else entry.restored.differ()
        if drawn is not None and region.options.determinism_check != "none":
            raise departures.drawn_by_others(region, drawn)
        if entry.norms is not None:  # as in `forward.run`
            _torch.push_function_mode(entry.norms)
            entry.norms = None
    except BaseException:
        entry.failed()
        raise
    finally:
        if entry.took:
            entry.end()
    return result


def _at_depth(depth: int, attempt: Any, live: Any) -> Any:
    """Call ``attempt`` with only the first ``depth`` levels active."""
    return levels.at_depth(depth, partial(attempt, live))


def _observed(name: str, attempt: Any, live: Any) -> Any:
    """Call ``attempt`` in the contexts that observers enter around each replay."""
    with ExitStack() as around:
        for observer in observers.of_replays:
            around.enter_context(observer(name))
        return attempt(live)


def _tell_of_draws(region: Region) -> None:
    """Let enclosing regions note the states of generators, if this replay is in their forward."""
    for mode in ledgers():
        if isinstance(mode, Record) and mode.draws is not None:
            for generator in region.draws.before:
                mode.draws.note(generator)


def _attempt(
    region: Region,
    level: int,
    values: list[Tensor],
    kept: Sequence[Tensor],
    wanted: list[int] | None,
    live: Any,
) -> tuple[list[Any], list[Tensor]]:
    """Run the body once, in new levels, and leave out the operations that are not live."""
    frames = region.frames
    depth = _torch.functorch_depth()
    connected = torch.is_grad_enabled()
    _torch.set_grad_enabled(connected or wanted is not None)
    numbers: dict[int, int] = {}
    leaves = standins = [*values]
    if level == 0:
        for i, required in enumerate(region.slots[0]):
            if required:
                leaves[i] = _leaf(values[i], connected)
    for k in range(max(level, 1), len(frames) + 1):
        numbers[k] = frames[k - 1].enter()
        standins = _lifted(frames[k - 1], region.slots[k], standins, numbers[k])
        leaves = standins if k == level else leaves
    if len(standins) > 1:
        _alias_repeated(standins)
    if region.written:
        standins = copied(standins, region.written)
    classes = function_classes() if level else ""
    first = _torch.next_sequence_number()
    if frames:
        with _torch.RequiresGradAllowed():  # as in functx's transforms
            results, late = _body(region, standins, kept, live)
    else:
        results, late = _body(region, standins, kept, live)
    if region.leaves and wanted is not None:
        _check_leaves(region, results, first)
    written: list[Tensor] = []
    if wanted is None:
        written = [levels.base_of(standins[i]) for i in region.written_outside()]
    del standins
    for k in range(len(frames), level, -1):
        results = frames[k - 1].lower_all(results, numbers[k])[0]
    if wanted is None:
        edges: list[Any] = results + written
    else:
        edges = [_edge(results[i], leaves) for i in wanted]
        if level:
            unwrap_for_backward(edges, classes)
    del results
    if frames:
        levels.leave_to(depth)
    _torch.set_grad_enabled(connected)
    if late.begun is not None and late.begun.holds_unwritten():
        raise BeginAgain
    return edges, leaves


def _attempt_at_the_base(
    region: Region, values: list[Tensor], kept: Sequence[Tensor], wanted: list[int], live: Any
) -> tuple[list[Any], list[Tensor]]:
    """`_attempt` for a region that was called without levels, if edges are wanted."""
    connected = torch.is_grad_enabled()
    _torch.set_grad_enabled(True)
    leaves = [_leaf(t, connected) if slot else t for t, slot in zip(values, region.slots[0])]
    standins = leaves
    if len(leaves) > 1:
        _alias_repeated(leaves)
    if region.written:
        standins = copied(leaves, region.written)
    first = _torch.next_sequence_number()
    results, late = _body(region, standins, kept, live)
    if region.leaves:
        _check_leaves(region, results, first)
    edges, t = list[Any](), None
    for i in wanted:
        t = results[i]
        edges.append(_edge(t, leaves) if t.grad_fn is None else _torch.gradient_edge(t))
    del results, t, standins
    _torch.set_grad_enabled(connected)
    if late.begun is not None and late.begun.holds_unwritten():
        raise BeginAgain
    return edges, leaves


def _check_leaves(region: Region, results: list[Tensor], first: int) -> None:
    """Raise an error if the tape does not lead to the same unseen leaves as the forward's (rule 3).

    These are the leaves that were read by code that no mode sees.
    """
    found = [getattr(node, "variable", None) for node in tape_of(results, first)]
    for reference in region.leaves:
        leaf = reference()
        if not any(variable is leaf for variable in found):
            raise departures.other_leaves(region, leaf)


def _lifted(frame: Any, slots: list[Any], values: Sequence[Tensor], number: int) -> list[Tensor]:
    """The values one level up. Values that were differentiated at that level become leaves."""
    lifted = frame.lift_all(values, slots, number)
    if frame.kind is not levels.GRAD:
        return lifted
    return [levels.require_grad(t) if slot else t for t, slot in zip(lifted, slots)]


def _leaf(value: Tensor, connected: bool) -> Tensor:
    """A leaf for a value at the base level; connected to the caller's graph if that is recorded."""
    if not connected and _torch.peek_interpreter() is None and not _torch.dispatch_depth():
        return value.detach().requires_grad_()
    if connected and value.requires_grad:
        return graphs.same_value(value, partial(torch.ops.aten.alias.default, value))
    return graphs.same_value(value, value.detach).requires_grad_()


def _alias_repeated(standins: list[Tensor]) -> None:
    """Replace repeated inputs by aliases.

    A level above may have had two leaves for what is one tensor here. They must stay two.
    """
    seen = set()
    for i, t in enumerate(standins):
        if id(t) in seen:
            alias = partial(torch.ops.aten.alias.default, t)
            standins[i] = levels.at_depth(max(_torch.level_of(t), 0), alias)
        seen.add(id(t))


def _edge(t: Tensor, leaves: list[Tensor]) -> Any:
    """The gradient edge of a result; ``None`` if it has no tape."""
    if not t.requires_grad:
        return None
    if t.grad_fn is None:
        return t if any(t is leaf for leaf in leaves) else None
    if _torch.peek_interpreter() is None:
        return _torch.gradient_edge(t)
    return levels.at_depth(max(_torch.level_of(t), 0), partial(_torch.gradient_edge, t))


def _body(
    region: Region, standins: list[Tensor], kept: Sequence[Tensor], live: Any
) -> tuple[list[Tensor], LateLedger]:
    """Run the function on stand-ins; returns its distinct results, and the ledger."""
    late, script = LateLedger(region, live, kept), region.script
    follows = bool(script.steps) and not region.further
    replayer: Any = (ReplayFollower if follows else Replayer)(region, late, standins)
    # The ledger begins at once in two more cases. (1) If there are other modes: their operations
    # are not calls of the region, and the listener knows this only from a ledger that is busy.
    # (2) If the replay has restored generators and may contain another replay, which must know it.
    has_one_inside = not follows or script.before is not None
    if script.ran.left_out == 0 or late.here[0] or (region.draws is not None and has_one_inside):
        replayer.watch()
    _torch.push_function_mode(replayer)
    mode = torch.is_grad_enabled()
    if region.cells is not None:
        region.cells.put()
    out = region.body(*standins[: region.n_args])
    if torch.is_grad_enabled() is not mode:  # as in the forward
        _torch.set_grad_enabled(mode)
    out = [out] if type(out) is Tensor else tree.partition(out)[0]
    results = None
    if follows and replayer.heir is None:
        results = replayer.returns(out)
    if results is None:
        if follows and replayer.heir is None:
            replayer.hand_over()
        replayer = replayer.listener()
        results = replayer.finish(out)
    del out
    _torch.pop_function_mode()
    late.end()
    if len(script.results) < len(results):
        results = [results[i] for i in script.results]
    if region.further:
        results += [replayer.left(number) for number in region.further]
    return results, late


def pulled_back(
    payload: Any,
    values: list[Tensor],
    kept: Sequence[Tensor],
    leaves: list[Tensor],
    results: list[int],
    cotangents: list[Tensor],
    asked: list[int],
) -> tuple[list[int], list[Tensor]]:
    """Replay a region, and pull cotangents back through the replay.

    Args:
        payload: The data of the node.
        values: The saved values of its level; the list is emptied.
        kept: The values that the policy saved.
        leaves: The leaves that no mode saw. A replay, too, reads the user's own leaves.
        results: The indices of the results that have a cotangent.
        cotangents: These cotangents.
        asked: The indices of the values and leaves whose gradients are asked for.

    Returns:
        The indices of the gradients that are not ``None``, and these gradients.
    """
    level, recorded = payload.level, torch.is_grad_enabled()
    traced = _torch.dispatch_depth() > 0
    since = graphs.last_node() if traced else None
    first = _torch.next_sequence_number()
    edges, inputs = replay(payload.region, level, values, kept, results)
    values.clear()
    if traced:
        graphs.close(since, payload.region.options.name, "replay")
    inputs += leaves
    if any(e is None for e in edges):
        cotangents = [c for e, c in zip(edges, cotangents) if e is not None]
        edges = [e for e in edges if e is not None]
    if recorded and level == 0:
        sharding.refuse_lost_derivatives(edges, first)
    if not edges:
        return [], []
    # At the base level, a recorded pullback leads through the tape of the replay: keep its buffers.
    retain = level == 0 and recorded
    wanted = tuple([inputs[i] for i in asked])
    grads = _torch.run_backward(
        *(tuple(edges), tuple(cotangents), retain, recorded, wanted, True), accumulate_grad=False
    )
    found, there = list[int](), list[Tensor]()
    for i, g in zip(asked, grads):
        if g is not None:
            found.append(i)
            there.append(g if _torch.unwrap_if_dead(g) is g else levels.alive(g))
    return found, there
