"""Which results of a region get nodes of their own.

NOTE [nodes apart]
torch's engine comes by each edge of a node that has run, with nothing where there is no gradient,
and calls hooks with ``None``. Without remat a hook is not called where no result that is pulled
back depends on its tensor. So where an input has a hook, results that depend on it and results that
do not are behind different nodes. Where both are pulled back, the region runs again for each. An
input that comes right from another region counts as one with a hook if that has one, and so does
what stands for one with a hook in the region around. Hooks further up the tape can't be seen from
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from functx import _torch_nodes
from functx._remat._tapes import leaves_below, nodes_of


class Reached(set[int]):
    """Ids of the leaves that the tapes of results end in.

    Args:
        leaves: ids of those of all.
        results: of the body.
        frames: of the region.

    Attributes:
        by: those of each result, if an input has a hook.
    """

    def __init__(
        self, leaves: Iterable[int], results: Sequence[Tensor | None], frames: Sequence[Any]
    ) -> None:
        super().__init__(leaves)
        self.by: list[set[int]] = []
        if len(results) > 1 and any(
            hooked(t, frame.region.outer)
            for frame in frames
            for t in (*frame.inputs, *frame.captured)
        ):
            self.by = [{id(leaf) for leaf in leaves_below(*nodes_of([r]))} for r in results]

    def also(self, results: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Further tensors, tangents, belong to results."""
        self.update(map(id, leaves_below(*nodes_of(tensors))))
        for i in results if self.by else ():
            self.by[i].update(map(id, leaves_below(*nodes_of(tensors))))


def hooked(t: Tensor, outer: Any) -> bool:
    """Whether ``t`` has a hook, or is the result of a region that has an input with one.

    Args:
        t: at any level.
        outer: the tracker of the region around, where ``t`` may stand for what has a hook.
    """
    if not t.requires_grad:
        return False
    if _torch_nodes.has_hooks(t):
        return True
    if (node := t.grad_fn) is not None:
        return getattr(getattr(node, "payload", None), "hooked", False)
    given_for = None if outer is None else getattr(outer, "given_for", None)
    given = None if given_for is None else given_for(t)
    return given is not None and hooked(given, outer.around())


def nodes_apart(
    frame: Any, tensors: Sequence[Tensor], places: Sequence[int]
) -> list[tuple[list[int], set[int]]]:
    """The results that share a node, with the inputs that none of them depends on.

    Args:
        frame: the level of the nodes.
        tensors: its inputs.
        places: the results that require grad.

    Returns:
        Places of results, and of inputs with hooks. ``NOTE [nodes apart]``.
    """
    if len(places) < 2:
        return [([*places], set())]
    region = frame.region
    by = getattr(region.reached, "by", ())
    unknown = region.connected or region.rewritten or region.overwritten or region.options.by_sight
    if not by or unknown or any(f.holds_duals() for f in region.frames):
        return [([*places], set())]
    inside = region.frames[region.frames.index(frame) + 1 :]
    those = {i: leaf for i, leaf in enumerate(frame.leaves) if hooked(tensors[i], region.outer)}
    groups: dict[frozenset[int], list[int]] = {}
    for place in places:
        own = [place]
        for inner in inside:
            own = inner.wanted_above(own)
        known = all(i < len(by) for i in own)  # what left otherwise than by return is not
        reached = {leaf for i in own if known for leaf in by[i]}
        beyond = frozenset(i for i, leaf in those.items() if known and leaf not in reached)
        groups.setdefault(beyond, []).append(place)
    return [(group, {*beyond}) for beyond, group in groups.items()]
