"""The pullback of a region: replay, then pull back; itself a region where it is differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._remat import forward, levels, sharding
from functx._remat.listener import listening
from functx._remat.observers import observers
from functx._remat.region import Options
from functx._remat.replay import replay
from functx._torch import graphs


def pull_back(
    payload: Any, saved: list[Tensor], cotangents: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of a node's values that require grad, and of its leaves, where they are needed.

    Saved are its values, its leaves, and what the policy kept.
    """
    asked = [i for i, need in zip(payload.requiring, needs) if need]
    given = [i for i, c in enumerate(cotangents) if c is not None]
    if not given or not asked:
        return [None] * len(payload.requiring)
    n, m = payload.n_values, payload.n_values + payload.n_leaves
    body = RegionPullback(payload, saved[n:m], [payload.wanted[i] for i in given], asked)
    flat = saved[:n] + saved[m:] + [levels.alive(cotangents[i]) for i in given]
    outer, traced = listening(), _torch.dispatch_depth() > 0
    since = graphs.last_node() if traced else None
    if outer is not None:
        outer.asleep = True
    try:
        # The backward is a region again (but under ``is_grads_batched``, whose vmap can't detach):
        if observers.tracers or (
            torch.is_grad_enabled()
            and any(map(levels.is_tracked, flat + body.leaves))
            and not any(map(_torch.is_legacy_batched, flat))
        ):
            options = Options(name="a pullback", is_pullback=True)
            title = f"the pullback of {payload.region.title}"
            grads = forward.run(body, body, flat, options, title)
        else:
            grads = body(*flat)
    finally:
        if outer is not None:
            outer.asleep = False
    del flat
    if traced:
        graphs.close(since, payload.region.options.name, "backward")
    if body.found == payload.requiring:
        return grads  # type: ignore[no-any-return]
    found = dict(zip(body.found, grads))
    return [found.get(i) for i in payload.requiring]


class RegionPullback:
    """Replay a region, and pull cotangents back through the replay.

    Called with the node's values, what the policy kept, and the cotangents. Leaves that no mode saw
    are the program's own, in a replay too. Not all gradients that are asked for are there:
    ``found`` says which are.
    """

    def __init__(
        self, payload: Any, leaves: list[Tensor], results: list[int], asked: list[int]
    ) -> None:
        self.payload, self.leaves, self.results, self.asked = payload, leaves, results, asked
        self.found: list[int] = []

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        payload = self.payload
        n, m = payload.n_values, len(flat) - len(self.results)
        values, kept, cotangents = [*flat[:n]], flat[n:m], flat[m:]
        recorded, traced = torch.is_grad_enabled(), _torch.dispatch_depth() > 0
        since = graphs.last_node() if traced else None
        first = _torch.next_sequence_number()
        edges, inputs = replay(payload.region, payload.level, values, kept, self.results)
        if traced:
            graphs.close(since, payload.region.options.name, "replay")
        inputs += self.leaves
        if any([e is None for e in edges]):
            cotangents = [c for e, c in zip(edges, cotangents) if e is not None]
            edges = [e for e in edges if e is not None]
        if recorded and payload.level == 0:
            sharding.refuse_lost_derivatives(edges, first)
        del flat, values
        if not edges:
            self.found = []
            return []
        # At the base level, what is recorded of the pullback runs through the tape of the replay.
        retain = payload.level == 0 and recorded
        grads: Sequence[Tensor | None] = _torch.run_backward(
            tuple(edges),
            tuple(cotangents),
            retain,
            recorded,
            tuple([inputs[i] for i in self.asked]),
            True,
            accumulate_grad=False,
        )
        self.found = self.asked
        if any([g is None for g in grads]):
            self.found = [i for i, g in zip(self.asked, grads) if g is not None]
        return [levels.alive(g) for g in grads if g is not None]
