"""A replay: the region runs again from the inputs that a node kept, on a tape of its own.

It runs on the stack cut to the depth of its inputs, in new levels for those above, and has left
them when it returns. The pullback is called after that: levels that have ended record nothing, and
those alive record what they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._core import function_classes, unwrap_for_backward
from functx._remat import departures, levels
from functx._remat.calls import DATA, RETURN, Call
from functx._remat.captures import tape_of
from functx._remat.generators import Restored
from functx._remat.guard import StackGuard
from functx._remat.ledger import BeginAgain, Record, Rerun, ledgers
from functx._remat.listener import Listener, listening
from functx._remat.observers import observers
from functx._remat.region import NEVER, Region
from functx._remat.writes import copied
from functx._torch import graphs


class Replayer(Listener):
    """Listens to a replay, whose ledger begins to listen at the first call that leaves out."""

    def __init__(self, region: Region, rerun: Rerun, standins: list[Tensor]) -> None:
        super().__init__(region, standins, (), region.calls)
        self.rerun, self.watching, self._here = rerun, False, _here()
        self.wanted = dict.fromkeys(region.further)
        self.stop = region.ran.left_out - 1

    def watch(self) -> None:
        # (Where the program has entered no mode; what an engine runs has modes of its own.)
        if not self.watching and _here() == self._here:
            self.watch_now()

    def watch_now(self) -> None:
        """Let the ledger listen."""
        self.watching, self.ledgers = True, (self.rerun,)
        self.rerun.begin(self.at)
        _torch.push_dispatch_mode(self.rerun)

    def log(self, call: Call) -> Call | None:
        if not self.watching and self.stop < NEVER - 1:
            # (A region inside has calls of its own, which are not told one by one.)
            inside = isinstance(call.func, str) and call.func not in (RETURN, DATA)
            if inside or self.at >= self.stop:
                self.watch()
        return super().log(call)

    def left(self, number: int) -> Tensor:
        """A result that left the forward otherwise than by return."""
        t = self.standins[-1 - number] if number < 0 else self.wanted[number]
        if t is None:
            raise departures.not_left(self.region)
        return t


def _here() -> tuple[int, int]:
    """The dispatch modes and the backward pass that this runs in."""
    return _torch.dispatch_depth(), _torch.current_backward()


def replay(
    region: Region,
    level: int,
    values: list[Tensor],
    kept: Sequence[Tensor],
    wanted: list[int] | None,
) -> tuple[list[Any], list[Tensor]]:
    """Run ``region`` again from its values at one level.

    Returns:
        For each result that is wanted the edge where its tape begins (``None`` if it has none), and
        the leaves that the values have become. Where ``wanted`` is ``None``, all results themselves
        and what was written, at that level, and nothing is left out.
    """
    with StackGuard(listening()) as entry:
        entry.take_norms()
        depth = 0
        if entry.functorch:
            depth = min(max(level - 1, 0, *map(_torch.level_of, values)), entry.functorch)
        if region.draws is not None and region.draws:
            _tell_of_draws(region)
            entry.restored = Restored(region.draws)
            entry.restored.begin()
        region.settings.put(entry.settings)
        entry.stop_caching(region.settings)
        modes = region.settings.modes(entry.settings)
        for mode in modes:
            _torch.push_function_mode(mode)
        attempt = partial(_attempt, region, level, values, kept, wanted)

        def run() -> tuple[list[Any], list[Tensor]]:
            try:
                return attempt(None if wanted is None else region.ran.live)
            except BeginAgain:
                entry.cut_back(depth, len(modes))
                if entry.restored is not None:
                    entry.restored.rewind()
                return attempt(None)

        with ExitStack() as around:
            for observer in observers.of_replays if wanted is not None else ():
                around.enter_context(observer(region.options.name))
            result = levels.at_depth(depth, run)
        for _ in modes:
            _torch.pop_function_mode()
        entry.settings.put(region.settings)
        entry.settle()
        drawn = None if entry.restored is None else entry.restored.differ()
        if drawn is not None and region.options.determinism_check != "none":
            raise departures.drawn_by_others(region, drawn)
        if entry.norms is not None:  # as in `forward.run`
            _torch.push_function_mode(entry.norms)
            entry.norms = None
    return result


def _tell_of_draws(region: Region) -> None:
    """Regions around whose forward this replay is part of note the generators as they are."""
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
    """One run of the body, in levels of its own, leaving out what is not live."""
    frames = region.frames
    depth = _torch.functorch_depth()
    connected = torch.is_grad_enabled()
    _torch.set_grad_enabled(connected or wanted is not None)
    numbers: dict[int, int] = {}
    leaves = standins = [*values]
    for i, required in enumerate(region.slots[0]) if level == 0 else ():
        if required:
            leaves[i] = _leaf(values[i], connected)
    for k in range(max(level, 1), len(frames) + 1):
        numbers[k] = frames[k - 1].enter()
        standins = _lifted(frames[k - 1], region.slots[k], standins, numbers[k])
        leaves = standins if k == level else leaves
    _alias_repeated(standins)
    standins = copied(standins, region.written)
    classes = function_classes() if level else ""
    first = _torch.next_sequence_number()
    with _torch.RequiresGradAllowed() if frames else nullcontext():  # as in functx's transforms
        results, rerun = _body(region, standins, kept, live)
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
    levels.leave_to(depth)
    _torch.set_grad_enabled(connected)
    if rerun.holds_unwritten():
        raise BeginAgain
    return edges, leaves


def _check_leaves(region: Region, results: list[Tensor], first: int) -> None:
    """The tape must lead to the leaves that the forward's led to where no mode saw it (rule 3)."""
    found = [getattr(node, "variable", None) for node in tape_of(results, first)]
    for reference in region.leaves:
        leaf = reference()
        if not any(variable is leaf for variable in found):
            raise departures.other_leaves(region, leaf)


def _lifted(frame: Any, slots: list[Any], values: Sequence[Tensor], number: int) -> list[Tensor]:
    """Values one level up; those that were differentiated there as leaves."""
    lifted = frame.lift_all(values, slots, number)
    if frame.kind is not levels.GRAD:
        return lifted
    return [levels.require_grad(t) if slot else t for t, slot in zip(lifted, slots)]


def _leaf(value: Tensor, connected: bool) -> Tensor:
    """A leaf for a value at the base level; part of the caller's graph where that is recorded."""
    if connected and value.requires_grad:
        return graphs.same_value(value, partial(torch.ops.aten.alias.default, value))
    return graphs.same_value(value, value.detach).requires_grad_()


def _alias_repeated(standins: list[Tensor]) -> None:
    """Inputs that a level above had two leaves for, and that are one tensor here, stay two."""
    seen = set()
    for i, t in enumerate(standins):
        if id(t) in seen:
            alias = partial(torch.ops.aten.alias.default, t)
            standins[i] = levels.at_depth(max(_torch.level_of(t), 0), alias)
        seen.add(id(t))


def _edge(t: Tensor, leaves: list[Tensor]) -> Any:
    """Where the tape of a result begins; ``None`` if it has none."""
    if not t.requires_grad:
        return None
    if t.grad_fn is None:
        return t if any(t is leaf for leaf in leaves) else None
    return levels.at_depth(max(_torch.level_of(t), 0), partial(_torch.gradient_edge, t))


def _body(
    region: Region, standins: list[Tensor], kept: Sequence[Tensor], live: Any
) -> tuple[list[Tensor], Rerun]:
    rerun = Rerun(region.ran, live, region.kept.given(kept))
    rerun.draws_again = bool(region.draws)
    replayer = Replayer(region, rerun, standins)
    # (What another mode calls is no call of the region: only where this one is seen to be busy.)
    if region.draws or region.ran.left_out == 0 or _torch.dispatch_depth():
        replayer.watch_now()
    _torch.push_function_mode(replayer)
    mode = torch.is_grad_enabled()
    out = region.body(*standins[: region.n_args])
    if torch.is_grad_enabled() is not mode:  # as in the forward
        _torch.set_grad_enabled(mode)
    results = replayer.finish(out)
    del out
    _torch.pop_function_mode()
    if replayer.watching and _torch.pop_dispatch_mode(None) is not rerun:
        raise AssertionError("functx: a dispatch mode was left behind")
    region.kept.end()
    results = [results[i] for i in region.results]
    return results + [replayer.left(number) for number in region.further], rerun
