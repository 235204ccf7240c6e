"""Forward over reverse: a backward pass inside the ``forward_ad.dual_level`` of its forward.

NOTE [gradients with tangents]
Under a user's dual level a region is lowered to a function of primals and tangents, and that is
what its node pulls back. It is right for reverse over forward; but autograd itself keeps duals, so
that gradients get tangents. So as long as that level lives, cotangents of primals are pulled back
through the function as it was before it was lowered, on the duals: a region again, to which forward
mode's rule gives tangents. Only cotangents of tangents go the other way. What such a pullback reads
can't be told from a tape of primals and tangents, so these replays run whole. A derivative may have
two formulas, of which one has no derivative of its own (that of group_norm): torch takes the other
where grad mode is on, or where cotangents of tangents come along. So it is on where that is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from functx import _torch
from functx._errors import RematError
from functx._remat._pullback import Pullback
from functx._remat._read_results import Replayed
from functx._remat._region import Region
from functx._remat._tracker import SILENT, tracking


def dual_frame(frames: Sequence[Any]) -> Any:
    """The frame of a user's dual level, if inputs are duals there."""
    return next((frame for frame in frames if frame.holds_duals()), None)


def inside_a_transform(name: str) -> RematError:
    """The error for duals that were made at a level of torch.func."""
    return RematError(
        f"remat: the region {name!r} is called on dual tensors of a forward_ad.dual_level inside "
        "functx.grad (or another transform), whose level can't keep their tangents. Take the "
        "tangents with functx.jvp there instead."
    )


def off_the_tape(t: Tensor | None) -> Tensor | None:
    """A gradient that is not to be differentiated backwards; its tangent stays."""
    if t is None or not t.requires_grad:
        return t
    with tracking(SILENT), torch.no_grad():
        primal, tangent = forward_ad.unpack_dual(t)
        primal = primal.detach()
        return primal if tangent is None else forward_ad.make_dual(primal, tangent.detach())


class Duals:
    """What a node of plain autograd is told of the dual level that it was made in.

    Attributes:
        tensors: the inputs as duals, until the node has saved them.
    """

    __slots__ = ("_fn", "_frames", "_inputs", "_results", "tensors")

    def __init__(self, region: Region, dual: Any) -> None:
        self.tensors: list[Tensor] = [*dual.inputs, *dual.captured]
        self._fn = dual.fn
        self._frames = region.frames[region.frames.index(dual) + 1 :]
        # Where the primal of each input is among the inputs of the node.
        self._inputs: list[int] = []
        at = 0
        for slot in dual.slots:
            self._inputs.append(at)
            at += dual.width(slot)
        # The result that each one of the lowered function is the primal of, if it is.
        self._results: list[int | None] = []
        for result, slot in enumerate(dual.out_slots):
            self._results += [result, None] if slot else [result]

    @staticmethod
    def alive(tensors: Sequence[Tensor]) -> bool:
        """Whether the dual level has not ended: when it does, torch takes tangents away."""
        if _torch.forward_ad_level() < 0:
            return False
        with tracking(SILENT):
            return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)

    def is_primal(self, place: int) -> bool:
        """Whether a result of the lowered function is no tangent."""
        return self._results[place] is not None

    def inputs(self) -> Sequence[int]:
        """Where the primal of each input is among the inputs of the node."""
        return self._inputs

    def pullback(
        self, region: Region, needs: Sequence[bool], cut: Sequence[bool], places: Sequence[int]
    ) -> Pullback:
        """The pullback of the function on duals.

        Args:
            region: that the node is of.
            needs: which inputs of the node get a gradient.
            cut: which others require grad while the function runs.
            places: results of the lowered function, primals all of them.
        """
        results = [r for p in places if (r := self._results[p]) is not None]

        def want(wanted: Sequence[int], kept: Sequence[Tensor], *_: Any) -> list[int]:
            own = chosen = [results[i] for i in wanted]
            for frame in self._frames:
                own = frame.wanted_above(own)
            region.want((*own,), kept, (), None)
            return chosen

        fn = self._fn
        if torch.is_grad_enabled() and not _torch.tracing():
            fn = Replayed(fn, region, 1, None)
        return Pullback(
            fn,
            [needs[i] for i in self._inputs],
            [cut[i] for i in self._inputs],
            range(len(results)),
            0,
            want,
        )
