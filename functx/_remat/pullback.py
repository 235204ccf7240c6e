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
    requiring = payload.requiring
    asked = [i for i, need in zip(requiring, needs) if need]
    results, given = list[int](), list[Tensor]()
    for i, c in zip(payload.wanted, cotangents):
        if c is not None:
            results.append(i)
            given.append(c if _torch.unwrap_if_dead(c) is c else levels.alive(c))
    del cotangents
    if not given or not asked:
        return [None] * len(requiring)
    n, m = payload.n_values, payload.n_values + payload.n_leaves
    values, leaves, kept = saved[:n], saved[n:m], saved[m:]
    del saved
    outer, traced = listening() if _torch.function_depth() else None, _torch.dispatch_depth() > 0
    since = graphs.last_node() if traced else None
    if outer is not None:
        outer.asleep = True
    try:
        # The backward is a region again (but under ``is_grads_batched``, whose vmap can't detach):
        if observers.tracers or (
            torch.is_grad_enabled()
            and any(map(levels.is_tracked, values + kept + given + leaves))
            and not any(map(_torch.is_legacy_batched, values + kept + given))
        ):
            flat = values + kept + given
            del values, kept, given
            body = RegionPullback(payload, leaves, results, asked)
            options = Options(name="a pullback", is_pullback=True)
            title = f"the pullback of {payload.region.title}"
            grads = forward.run(body, body, flat, options, title)
            found = body.found
        else:
            found, grads = pulled_back(payload, values, kept, leaves, results, given, asked)
    finally:
        if outer is not None:
            outer.asleep = False
    if traced:
        graphs.close(since, payload.region.options.name, "backward")
    if len(found) == len(requiring):
        return grads  # type: ignore[no-any-return]
    by_number = dict(zip(found, grads))
    return [by_number.get(i) for i in requiring]


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
        payload: what the node knows.
        values: those of its level; the list is emptied.
        kept: what the policy kept.
        leaves: those that no mode saw. They are the program's own, in a replay too.
        results: which results of the level have a cotangent.
        cotangents: these.
        asked: which of the values and leaves a gradient is asked for.

    Returns:
        Which gradients there are, and these.
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
    for edge in edges:
        if edge is None:
            cotangents = [c for e, c in zip(edges, cotangents) if e is not None]
            edges = [e for e in edges if e is not None]
            break
    if recorded and level == 0:
        sharding.refuse_lost_derivatives(edges, first)
    if not edges:
        return [], []
    # At the base level, what is recorded of the pullback runs through the tape of the replay.
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


class RegionPullback:
    """`pulled_back` as the body of a region, which is given the node's values and the rest.

    Not all gradients that are asked for are there: ``found`` says which are.
    """

    def __init__(
        self, payload: Any, leaves: list[Tensor], results: list[int], asked: list[int]
    ) -> None:
        self.payload, self.leaves, self.results, self.asked = payload, leaves, results, asked
        self.found: list[int] = []

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        n, m = self.payload.n_values, len(flat) - len(self.results)
        values, cotangents = [*flat[:n]], [*flat[m:]]
        args = self.payload, values, flat[n:m], self.leaves, self.results, cotangents, self.asked
        del flat
        self.found, grads = pulled_back(*args)
        return grads
