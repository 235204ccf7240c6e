"""Replay, then pull back: the derived function that a region's node is differentiated with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from functx import _torch
from functx._remat._region import Flat
from functx._remat._tracker import SILENT, active_tracker, tracking


class Pullback:
    """``(inputs, cotangents) -> gradients`` of a function, by running it on a fresh tape.

    The tape is pulled back *after its level has ended*, with ``create_graph`` as the surroundings
    say: a dead level records nothing, living ones record what they need.

    Args:
        fn: the function to replay.
        needs: which inputs get a gradient.
        wanted: the results that have a cotangent.
        plain: the function ran on plain autograd, below all transforms, and so do its replays:
            that keeps old-style Functions, hooks and ``.numpy()`` working.
    """

    def __init__(
        self, fn: Flat, needs: Sequence[bool], wanted: Sequence[int], plain: bool
    ) -> None:
        self.plain = plain
        self.fn = fn
        self.needs = tuple(needs)
        self.wanted = tuple(wanted)

    def __call__(self, *tensors: Tensor) -> list[Tensor | None]:
        """Gradients of the inputs that need one, in their order."""
        n = len(self.needs)
        primals, cotangents = tensors[:n], tensors[n:]
        tracker = active_tracker()
        plain = self.plain and _torch.peek_interpreter_stack() is None
        with tracking(SILENT):
            inputs, outs = self._plain(primals) if plain else self._level(primals)
        if tracker is not None:
            tracker.note(inputs)
        # On plain autograd the tape of the replay is part of what a second derivative needs.
        return _pull_back(outs, inputs, cotangents, plain and torch.is_grad_enabled())

    def _plain(self, primals: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """On plain autograd, below all transforms."""
        recording = torch.is_grad_enabled()
        inputs = [
            # A stand-in of the base level is a leaf already; anything else must be cut off.
            t if not need or (recording and t.requires_grad) else t.detach().requires_grad_()
            for t, need in zip(primals, self.needs)
        ]
        with torch.enable_grad():
            outs = self.fn(*inputs)
        return self._select(inputs, outs)

    def _level(self, primals: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """At a grad level that has ended when this returns."""
        level = _torch.enter_grad_level()
        try:
            with torch.enable_grad():
                inputs = [
                    _torch.require_grad(w) if need else w
                    for w, need in zip(
                        (_torch.wrap_for_grad(t, level) for t in primals), self.needs
                    )
                ]
                outs = self.fn(*inputs)
        finally:
            _torch.exit_grad_level()
        return self._select(inputs, outs)

    def _select(
        self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        return (
            [t for t, need in zip(inputs, self.needs) if need],
            [outs[i] for i in self.wanted],
        )


def _pull_back(
    outs: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    retain_graph: bool,
) -> list[Tensor | None]:
    taped = [(o, c) for o, c in zip(outs, cotangents) if o is not None and o.requires_grad]
    if not taped:
        return [None] * len(inputs)
    return list(
        _torch.run_backward(
            tuple(o for o, _ in taped),
            tuple(c for _, c in taped),
            retain_graph,
            torch.is_grad_enabled(),  # create_graph
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    )
