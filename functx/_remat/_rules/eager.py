"""The base level: all transforms are peeled off, the body runs, plain autograd gets a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_globals, _torch_nodes, _torch_vmap
from functx._remat import _scripted as _scripted  # which observes calls of scripts
from functx._remat._alike import alike
from functx._remat._apart import has_left
from functx._remat._capture import FirstRun
from functx._remat._environment import Environment
from functx._remat._leaving import values_at_base
from functx._remat._node import attach
from functx._remat._operator import base_rule
from functx._remat._profile import shown
from functx._remat._recording_run import RecordingRun
from functx._remat._region import Flat, Region
from functx._remat._rules import proxy
from functx._remat._rules.base import Frame
from functx._remat._rules.jvp import DualFrame, has_dual
from functx._remat._rules.legacy_vmap import LegacyVmapFrame
from functx._remat._tapes import PLAIN
from functx._remat._written_since import watch_kept
from functx._torch import dispatch_mode_depth
from functx._torch_nodes import tensor_over


class EagerFrame(Frame):
    """The bottom of the stack. A slot says whether an input requires grad in plain autograd.

    NOTE [run first, make the node after]
    Inside a ``Function.forward`` grad mode is off, and attention, recurrent layers and folded
    matmuls pick other kernels than without remat. So the body runs on leaf stand-ins in the
    caller's grad mode; then that tape is dropped, and a node is attached to detached results.
    """

    _looked_at = -1  # how many dispatch modes there were when this was found out
    _traced = False

    def __init__(self, fn: Flat, region: Region) -> None:
        super().__init__(0, fn, region)
        self.out_requires: list[bool] = []

    def lower(self, t: Tensor) -> list[Tensor]:
        """Inputs are as they are; whether they require grad is the slot.

        Also where grad mode is off: the body may turn it on.
        """
        self.slots.append(t.requires_grad)
        return [t]

    def lower_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`lower` of each."""
        self.slots += [t.requires_grad for t in tensors]
        return _torch.unwrap_dead(tensors)

    def transparent(self) -> bool:
        """It only records."""
        return True

    def differentiates(self) -> bool:
        """Whether an input requires grad here."""
        return any(self.slots)

    def lift(self, values: Sequence[Tensor], slot: Any, level: int) -> Tensor:
        """A leaf of the throw-away tape."""
        (value,) = values
        leaf = value
        if slot:
            leaf, attributes = _torch.detached(value).requires_grad_(), value.__dict__
            if attributes or value.__class__ is not Tensor:
                self.region.marked = True
                leaf = alike(leaf, value.__class__, attributes)
            elif leaf.__class__ is Tensor:  # else it is a fake one, while a graph is traced
                leaf.__dict__ = attributes
        first = self.region.first_run
        if first is not None:  # else it is traced, after its first run
            self.leaves.append(id(leaf))
            if slot:
                first.leaves[id(leaf)] = leaf
        return leaf

    def admit_one(self, t: Tensor) -> Tensor:
        """`capture` and `admit`, of one tensor, where there is no other level and none is active.

        What it runs is a view, which no record has.
        """
        leaf = t
        self.captured.append(t)
        if not t.requires_grad:
            self.slots.append(False)
        else:
            self.slots.append(True)
            if dispatch_mode_depth() != self._looked_at:
                self._looked_at, self._traced = dispatch_mode_depth(), _torch.tracing()
            if self._traced or type(t) not in PLAIN or t.__dict__:
                leaf = _torch.detached(t).requires_grad_()
                if t.__dict__ or type(t) not in PLAIN:
                    self.region.marked = True
                    leaf = alike(leaf, type(t), t.__dict__)
            else:
                leaf = tensor_over(t, True)
            self.region.first_run.leaves[id(leaf)] = leaf
        self.leaves.append(id(leaf))
        return leaf

    def cut(self, t: Tensor) -> Tensor:
        """The value alone."""
        return _torch.detached(t)

    def __call__(self, *values: Tensor) -> list[Tensor | None]:
        """NOTE [run first, make the node after]."""
        outs = self.fn(*self.lift_all(values, self.slots, 0))
        requires = self.out_requires = []
        for i, out in enumerate(outs):
            # A leaf was made by the body itself, of nothing; it stays as it is.
            taped = out is not None and out.grad_fn is not None
            requires.append(taped)
            if taped:
                outs[i] = _off_the_tape(out)
        return outs

    def finish(self, outs: list[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The results behind a node that keeps the inputs."""
        watch_kept(self.region)
        untaped = proxy.keeping() and not self.differentiates()
        left = {} if untaped else self.region.escaped(outs)
        tensors = [*inputs, *self.captured]
        if not left:
            return attach(self, tensors, outs, self.out_requires)
        has_left(self.region, left.values())
        values = values_at_base(left.values(), self.region.frames)
        requires = [*self.out_requires, *(t.requires_grad for t in values)]
        results = [*outs, *map(_off_the_tape, values)]
        return attach(self, tensors, results, requires)


def _off_the_tape(t: Tensor | None) -> Tensor:
    """``t`` without its history: the tensor itself, for whoever holds it, unless it is a view."""
    assert t is not None
    if not _torch.detachable(t):
        return _torch.detached(t)
    _torch.detach_in_place(t)
    _torch_nodes.forget_hooks(t)  # they are the tape's: a replay has its own
    return t


@base_rule
def run(fn: Flat, inputs: Sequence[Tensor], region: Region) -> list[Tensor | None]:
    """The first run of a region, at the bottom of the stack."""
    keeping = proxy.keeping()
    if keeping and (isinstance(fn, EagerFrame) or not torch.is_grad_enabled()):
        return proxy.emit(fn, inputs, region, first_run)
    if (
        not keeping
        and _torch.forward_ad_level() >= 0
        and not isinstance(fn, (DualFrame, LegacyVmapFrame))
        and has_dual(inputs, fn)
    ):
        dual = DualFrame(fn, region)
        lowered = dual.lower_all(inputs)
        dual.inputs = inputs
        region.frames.insert(0, dual)
        return dual.finish(run(dual, lowered, region), inputs)
    if _torch_vmap.legacy_vmap_level() and any(map(_torch_vmap.is_legacy_batched, inputs)):
        batched = LegacyVmapFrame(fn, region)
        lowered = batched.lower_all(inputs)
        batched.inputs = inputs
        region.frames.insert(0, batched)
        return batched.finish(run(batched, lowered, region), inputs)
    frame = EagerFrame(fn, region)
    frame.slots = [t.requires_grad for t in inputs]  # unwrapped they are, by whoever calls
    frame.inputs = inputs
    region.frames.insert(0, frame)
    # A function that is lowered may ask plain autograd for derivatives of its own.
    outs = run(frame, inputs, region) if keeping else first_run(frame, inputs, region)
    return frame.finish(outs, inputs)


def first_run(fn: Flat, inputs: Sequence[Tensor], region: Region) -> list[Tensor | None]:
    """Run the body and find out what it needs."""
    region.environment = environment = Environment(region.options, inputs, *region.reaches)
    run = RecordingRun if region.options.records else FirstRun
    first = run(region, lift_constants=proxy.keeping())
    around = region.outer
    first.pulls_back = region.options.replay and (around is None or around.pulls_back)
    region.first_run = first
    try:
        # The tape of this run is thrown away; what is alive on it tells what a pullback reads.
        with shown(region.options), _torch_globals.without_saved_tensors_hooks():
            outs = fn(*inputs)
    finally:
        region.first_run = None
        if first.ledger is not None:
            first.ledger.let_go()
    constants, written = region.constants, set[int]()
    if constants:
        written = {id(c.value) for c in constants if c.before is not None}
    first.check_captures()
    first.check_writes()
    read = inputs, region.captured, [c.value for c in constants]
    region.stored = environment.seal(written, first.had, first.own, *read)
    region.entries, region.origins = first.entries, first.origins
    region.passed_on = first.passed_on()
    region.inner_keeps = first.entry.inside
    region.n_captured = len(region.captured)
    return outs
