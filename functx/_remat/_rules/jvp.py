"""jvp of a region: one region that returns primals and tangents together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from functx import _torch, _torch_vmap
from functx._remat._apart import Reached
from functx._remat._escape import with_tangents
from functx._remat._holders import base_of
from functx._remat._operator import rule
from functx._remat._packed import note_packed
from functx._remat._partial import Above, above
from functx._remat._region import Flat, Region
from functx._remat._rules.base import Frame
from functx._remat._step import has_memory
from functx._remat._tangents import unpack
from functx._remat._tapes import nodes_of, tape_below
from functx._remat._watch import tell_of_a_copy, watching


class DualFrame(Frame):
    """The duals of a user's own ``forward_ad.dual_level``, and the common part of forward mode.

    A slot says whether an input has a tangent; one that has becomes two values. Duals are
    unpacked, the region is lowered once to the function of primals and tangents (a Function's own
    ``jvp`` would run the primal twice), and its results are packed again. Inside, it runs at a
    jvp level.
    """

    above: Above = MappingProxyType({})  # NOTE [part of a gradient]

    def __init__(self, fn: Flat, region: Region, level: int = 0) -> None:
        super().__init__(level, fn, region)
        self.out_slots: list[bool] = []
        if type(self) is DualFrame:
            # A dual for as long as the level lives.
            self._witness = forward_ad.make_dual(torch.empty(0), torch.empty(0))

    def unwrap(self, t: Tensor) -> Tensor:
        """A primal or tangent of this level as a value of the level below."""
        return t

    def wrap(self, t: Tensor) -> Tensor:
        """A value of the level below as a primal or tangent of this level."""
        return t

    def dual(self) -> bool:
        """It is."""
        return True

    def holds_duals(self) -> bool:
        """Whether an input has a tangent."""
        return type(self) is DualFrame and any(self.slots)

    def is_dual_here(self, t: Tensor) -> bool:
        """Whether ``t`` can have a tangent of this level."""
        return True

    def lower(self, t: Tensor) -> list[Tensor]:
        """The primal, and the tangent if there is one, which is the slot."""
        if not self.is_dual_here(t):
            self.slots.append(False)
            return [t]
        primal, tangent = unpack(t)
        self.slots.append(tangent is not None)
        # Inside a wrapper is its primal, as the level below made it; unpacking makes an alias.
        primal = self.unwrap(t if self.unwrap(t) is not t else primal)
        return [primal] if tangent is None else [primal, self.unwrap(tangent)]

    def wanted_above(self, wanted: Sequence[int]) -> list[int]:
        """A primal and its tangent belong to one result."""
        owner = [i for i, slot in enumerate(self.out_slots) for _ in range(2 if slot else 1)]
        return sorted({owner[i] for i in wanted})

    def width(self, slot: Any) -> int:
        """A primal, or a primal and a tangent."""
        return 2 if slot else 1

    def lift(self, values: Sequence[Tensor], slot: Any, level: int) -> Tensor:
        """A dual of the fresh level."""
        primal, *tangent = (_torch.wrap_for_grad(v, level) if level else v for v in values)
        return make_dual(primal, tangent[0]) if slot else primal

    def __call__(self, *values: Tensor) -> list[Tensor | None]:
        """Primals and tangents of the results; remembers which have a tangent."""
        if type(self) is DualFrame and (
            self.region.first_run is not None
            or _torch.forward_ad_level() < 0
            or is_dual(self._witness)
        ):
            return self._in_the_users_level(values)
        self.inside = level = _torch.enter_jvp_level()
        try:
            with _torch.set_forward_grad_enabled(True), _dual_level():
                outs = self.fn(*self.lift_all(values, self.slots, level))
                return self._parts(outs, level)
        finally:
            _torch.exit_jvp_level()

    def _in_the_users_level(self, values: Sequence[Tensor]) -> list[Tensor | None]:
        """On duals of plain autograd, as without remat.

        Not in replays inside another level: duals of the replay would mix with those around it.
        """
        self.inside = _torch.interpreter_depth()
        with _dual_level():
            return self._parts(self.fn(*self.lift_all(values, self.slots, 0)), 0)

    def _parts(self, outs: Sequence[Tensor | None], level: int) -> list[Tensor | None]:
        results: list[Tensor | None] = []
        slots: list[bool] = []
        if self.region.first_run is not None:
            births = self.region.births
            self.duals = with_tangents(births, outs, lambda t: unpack(t)[1], level)
        for i, out in enumerate(outs):
            if out is None:
                results.append(None)
                slots.append(False)
                continue
            parts = [p for p in unpack(_torch.unwrap_if_dead(out)) if p is not None]
            slots.append(len(parts) == 2)
            if len(parts) == 2 and self.region.first_run is not None:
                self._belong(i, parts[1:])
            results += [_torch.unwrap_for_grad(p, level) for p in parts] if level else parts
        self.out_slots = slots
        frames = self.region.frames
        outside = frames[: frames.index(self)] if self.region.first_run is not None else ()
        if sum(slots) > 1 and any(frame.differentiates() for frame in outside):
            self.above = self._above_tangents(results)
        return results

    def _above_tangents(self, results: Sequence[Tensor | None]) -> Above:
        """What is computed from tangents; of a primal, who looks at it is given an alias."""
        places = accumulate(2 if slot else 1 for slot in self.out_slots)
        tangents = {n - 1 for n, slot in zip(places, self.out_slots) if slot}
        known = above(results, tape_below(nodes_of(results))[0])
        return {place: those for place, those in known.items() if place in tangents}

    def _belong(self, place: int, tangents: Sequence[Tensor]) -> None:
        """What the tangents of a result depend on, it depends on."""
        region, own = self.region, [place]
        region.first_run.check_tape(tangents)
        reached = region.reached
        assert isinstance(reached, Reached)
        for inner in region.frames[region.frames.index(self) + 1 :]:
            own = inner.wanted_above(own)
        reached.also(own, tangents)

    def finish(self, outs: list[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Duals where results have a tangent."""
        values = iter(outs)
        results: list[Tensor | None] = []
        for slot in self.out_slots:
            primal = next(values)
            if primal is not None:
                primal = self.wrap(primal)
                if slot:
                    tangent = next(values)
                    assert tangent is not None
                    primal = make_dual(primal, self.wrap(tangent))
                    note_packed(self.region, primal)
            results.append(primal)
        return results


@rule(_torch.TransformType.Jvp)
class JvpFrame(DualFrame):
    """A jvp level."""

    def __init__(self, interpreter: Any, fn: Flat, region: Region) -> None:
        super().__init__(fn, region, interpreter.level())

    def unwrap(self, t: Tensor) -> Tensor:
        """The value inside the wrapper."""
        return _torch.unwrap_for_grad(t, self.level)

    def is_dual_here(self, t: Tensor) -> bool:
        """Tensors of outer levels have none."""
        return _torch.unwrap_for_grad(t, self.level) is not t

    def inside_of(self, t: Tensor) -> Tensor | None:
        """The primal; the level has ended, and with it the tangent."""
        return _torch.get_unwrapped(t) if _torch.is_grad_wrapper(t) else None

    def leave(self, t: Tensor) -> Tensor:
        """A primal alone: what had a tangent can't leave."""
        self.out_slots.append(False)
        return super().leave(t)

    def wrap(self, t: Tensor) -> Tensor:
        """A wrapper of this level."""
        return _torch.wrap_for_grad(t, self.level)


def _dual_level() -> Any:
    return nullcontext() if _torch.forward_ad_level() >= 0 else forward_ad.dual_level()


def is_dual(t: Tensor) -> bool:
    """Whether ``t`` has a tangent."""
    return _torch.forward_ad_level() >= 0 and unpack(t)[1] is not None


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """Pack a dual; forward mode keeps the layout of the primal, which must own its memory.

    So the primal may be a copy; and torch copies a tangent of another layout.
    """
    with watching(False), torch.enable_grad():
        given = primal
        if any(s == 0 and n > 1 for s, n in zip(primal.stride(), primal.shape)):
            primal = primal.contiguous()
        if _torch_vmap.is_legacy_batched(primal) and (level := _torch_vmap.legacy_vmap_level()):
            size = _torch_vmap.legacy_batch_size(primal, level)
            parts = [
                _torch_vmap.remove_legacy_batch_dim(t, level, size, 0) for t in (primal, tangent)
            ]
            return _torch_vmap.add_legacy_batch_dim(forward_ad.make_dual(*parts), 0, level)
        dual = forward_ad.make_dual(primal, tangent)
        if _torch.dispatch_mode_depth():
            packed = forward_ad.unpack_dual(dual).tangent
            for source, copy in ((given, primal), (tangent, packed)):
                _tell_of_a_copy(base_of(source), base_of(copy))
    return dual


def _tell_of_a_copy(source: Tensor, copy: Tensor) -> None:
    in_memory = source is not copy and has_memory(source) and has_memory(copy)
    if in_memory and _torch.storage_key(source) != _torch.storage_key(copy):
        tell_of_a_copy(source, copy)


def has_dual(inputs: Sequence[Tensor], fn: Flat) -> bool:
    """Whether the base level of a region is under a user's own ``dual_level``.

    A jvp level among the frames has entered the only level there is; then base tensors are duals
    only if one of the inputs says so.
    """
    frame: Any = fn
    while isinstance(frame, Frame):
        if isinstance(frame, JvpFrame):
            return any(forward_ad.unpack_dual(t).tangent is not None for t in inputs)
        frame = frame.fn
    return True
