"""What a backward pass comes by, with a gradient or with nothing.

NOTE [given nothing]
A custom Function may give ``None`` as the gradient of what it was given, and torch's engine goes on
with that: it calls hooks for when the gradient of a leaf is accumulated, which may step a weight
that has a gradient from before. The node of a region is given nothing for a result that nothing was
computed from, too, and hands on nothing to inputs that only such results depend on; there the
engine would not come by without remat. Which of both it is, the tape tells that the pass began
with: followed through nodes of regions by what their results depend on, it has all that would be
come by. It is followed, once a pass, where a leaf has such a hook.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor

from functx import _torch, _torch_nodes
from functx._remat._apart import hides_history
from functx._remat._in_turn import edges_of_part, leading, part_of
from functx._remat._partial import passes_under_way
from functx._remat._tapes import leaf_of, tape_below
from functx._torch_edges import calls_only_with_a_gradient

_LATEST = 8  # passes, of which one begins another


def come_by(node: Any, cotangents: Sequence[Tensor | None]) -> list[int]:
    """Which results of a region's node are pulled back. ``NOTE [given nothing]``."""
    wanted = [i for i, c in enumerate(cotangents) if c is not None]
    payload = node.payload
    if len(wanted) == len(cotangents) or payload.level > 0 or _torch.tracing():
        return wanted
    edges = node.next_functions
    each = [leading(node, n) for n in wanted] or [[False] * len(edges)]
    led = map(any, zip(*each))
    beyond = [one for (one, _), leads in zip(edges, led) if one is not None and not leads]
    for leaf in tape_below(beyond)[1] if beyond else ():
        # Torch calls such a hook where a node has handed on nothing.
        if _torch_nodes.hooks_after(leaf) and id(leaf) not in _under_way():
            calls_only_with_a_gradient(leaf)
    return wanted


class _Passes(threading.local):
    def __init__(self) -> None:
        self.latest: dict[int, Set[int]] = {}


_passes = _Passes()


def _under_way() -> Set[int]:
    """The leaves, by id, that the backward pass of this thread comes by, so far as it is sure.

    Not nodes: of these another object may tell when they are looked at again.
    """
    latest = _passes.latest
    if (found := latest.get(task := _torch.current_graph_task_id())) is None:
        found = latest[task] = _followed()
        while len(latest) > _LATEST:
            del latest[next(iter(latest))]
    return found


def _followed() -> Set[int]:
    stack = [part_of(edge) for began, _ in passes_under_way() for edge in began if edge[0]]
    seen, found = {*stack}, set[int]()
    for node, n in stack:  # which grows
        if (leaf := leaf_of(node)) is not None:
            found.add(id(leaf))
        payload = getattr(node, "payload", None)
        if payload is None or not hides_history(payload.region):
            below = {*map(part_of, edges_of_part(node, n))} - seen
            seen |= below
            stack += below
    return found
