"""Which results of a region get nodes of their own.

NOTE [nodes apart]
torch's engine comes by each edge of a node that has run, with nothing where there is no gradient,
and calls hooks with ``None``. Without remat a hook is not called where no result that is pulled
back depends on its tensor. So where an input has a hook, results that depend on it and results that
do not are behind different nodes. Where both are pulled back, the region runs again for each. An
input that comes right from another region counts as one with a hook if that has one, and so does
what stands for one with a hook in the region around, or may have been computed from it there. So
does what a custom Function gave, whose backward is given zeros for nothing: a leaf above would get
zeros where it has no gradient; if that makes two nodes and no more, as each may have to run the
region again. What is further up the tape can't be seen from here. Hooks for when a gradient is
accumulated need no nodes, see `_come_by`.

NOTE [all of a tape]
Where gradients of some tensors are asked for, torch's engine comes by what leads to these, and a
replay is pulled back like that. ``.backward()`` comes by all of a tape: by what leads to leaves
that the body made, with its hooks and custom Functions, and by the node that raises for what the
backward of a Function marked ``@once_differentiable`` gave. So where a tape ends in other leaves
than those that stand for inputs, the node of the region has an edge to a leaf of nobody's. If the
engine comes by that, replays are pulled back to all of their leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from functx import _torch_nodes
from functx._remat._follows import made_by
from functx._remat._hung_inside import Inside, hung_inside
from functx._remat._hung_on_given import after_refused
from functx._remat._in_turn import leaves_of_each, turn_of
from functx._remat._one_by_one import groups_of, of_the_body
from functx._remat._partial import (
    Above,
    Parts,
    above,
    has_parts,
    parts_of,
    shifted,
    watch,
    with_left,
)
from functx._remat._tapes import edges_of, leaves_below, nodes_of
from functx._torch import sequence_number

OfInside = Sequence[tuple[Parts, Parts]]
ZEROS, HOOK = 1, 2
_FEW = 2
Relations = tuple[Above, Sequence[int], Sequence[int], Sequence[Set[int]], OfInside]


class Reached(set[int]):
    """Ids of the leaves that the tapes of results end in.

    Args:
        leaves: ids of those of all.
        results: of the body.
        frames: of the region.
        nodes: of the tapes, where they were looked at.

    Attributes:
        above: which results are computed from which others. `_partial`.
        by: those of each result, if an input has a hook.
        elsewhere: results whose tapes end in others as well. ``NOTE [all of a tape]``.
        firsts: the number of the first node of each result.
        ids: of the leaves, in the order that they were given in.
        leads: for each result, which of those its tape ends in, if there are several results.
        groups: of results that are pulled back together. ``NOTE [one by one]`` in `_one_by_one`.
        inside: the hooks that the body hung on results. ``NOTE [hooks inside and outside]``.
        numbers: those of all nodes below.
        parts: of each result, where regions inside have several. `_partial`.
        start: what these two are to be added to.
        within: the turn of each result in the region inside that made it, if one made several.
    """

    above: Above = MappingProxyType({})
    elsewhere: Set[int] = frozenset()
    firsts: Sequence[int] = ()
    leads: Sequence[Set[int]] = ()
    groups: Sequence[int] = ()
    inside: Mapping[int, Inside] = MappingProxyType({})
    numbers: Sequence[int] = ()
    parts: OfInside = ()
    start = 0
    within: Sequence[Any] = ()

    def __init__(
        self,
        leaves: Iterable[int],
        results: Sequence[Tensor | None],
        frames: Sequence[Any],
        nodes: Sequence[Any] = (),
    ) -> None:
        self.ids = [*leaves]
        super().__init__(self.ids)
        if nodes:
            self._look(results, nodes)
            first = frames[0].region.first_run
            if first is not None and first.entry.inside and has_parts(nodes):
                self.parts = [*map(parts_of, results)]
        self.by: list[set[int]] = []
        if len(results) < 2:
            return
        if nodes:
            self.groups = groups_of(results)
        if any(
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

    def leads_elsewhere(
        self, results: Iterable[tuple[int, Tensor | None]], others: Mapping[int, Tensor], name: str
    ) -> None:
        """Some results may lead to these leaves, which are no inputs of the region ``name``."""
        for t in others.values():
            if _torch_nodes.hooks_after(t):
                raise after_refused(t, name)
        ids = others.keys()
        self.elsewhere |= {
            i for i, r in results if not ids.isdisjoint(map(id, leaves_below(*nodes_of([r]))))
        }

    def _look(self, results: Sequence[Tensor | None], nodes: Sequence[Any]) -> None:
        if found := hung_inside(results):
            self.inside = found
        if len(results) > 1:
            self.above = above(results, nodes)
            places = {leaf: n for n, leaf in enumerate(self.ids)}
            self.leads = [{*map(places.__getitem__, own)} for own in leaves_of_each(results)]
        starts = len({*nodes_of(results)})  # which come first
        self.numbers = [*map(sequence_number, nodes[starts:])]
        if starts > 1:
            below = {node for one in nodes for node, _ in one.next_functions}
            self.numbers += [sequence_number(node) for node in nodes[:starts] if node in below]
        self.firsts = [*map(_number_of_first, results)]
        if len({*self.firsts}) < len(results):
            self.within = [*map(_turn_inside, results)]

    def turn(self, result: int) -> tuple[int, Any]:
        """When a result was made, to be compared. ``NOTE [order of hooks]`` in `_in_turn`."""
        within = self.within[result] if result < len(self.within) else ()
        return self.firsts[result] if result < len(self.firsts) else -1, within

    def relations(self, start: int) -> Relations:
        """What is known of the nodes, with numbers from ``start`` on; as of a run that is known."""
        firsts, numbers = ([n - start for n in those] for those in (self.firsts, self.numbers))
        return self.above, firsts, numbers, self.leads, shifted(self.parts, -start)

    def relate(self, known: Relations, start: int) -> None:
        """The other way round."""
        self.above, self.firsts, self.numbers, self.leads, self.parts = known
        self.start = start

    def leads_of(self, results: Iterable[int]) -> Set[int] | None:
        """The ids of the leaves that some results lead to; ``None`` if that is not known."""
        found = set[int]()
        for i in results:
            if i >= len(self.leads):
                return None
            found.update(map(self.ids.__getitem__, self.leads[i]))
        return found


def _number_of_first(t: Tensor | None) -> int:
    edges = edges_of(t)
    return sequence_number(edges[0][0]) if edges else -1


def _turn_inside(t: Tensor | None) -> Any:
    for node, output in edges_of(t):
        node, output = made_by((node, output))
        if (payload := getattr(node, "payload", None)) is not None:
            return turn_of(payload, output)
    return ()


_nobodys = torch.zeros((), requires_grad=True)


def is_nobodys(t: Tensor) -> bool:
    """Whether ``t`` is the leaf that stands for all others. ``NOTE [all of a tape]``."""
    return t is _nobodys


def edges_elsewhere(frame: Any, places: Sequence[int]) -> list[Tensor]:
    """The leaf to which a node has an edge if its results lead to others. ``NOTE [all of a tape]``.

    Args:
        frame: the level of the node.
        places: of its results.
    """
    region = frame.region
    elsewhere = getattr(region.reached, "elsewhere", None)
    if not elsewhere or frame.level:  # in a transform, gradients are asked for
        return []
    those = of_the_body(frame.levels_inside(), [*places])
    return [] if elsewhere.isdisjoint(those) else [_nobodys]


def hooked(t: Tensor, outer: Any) -> int:
    """Whether it is told to ``t``, or above it, that no gradient comes there.

    It has a hook: `HOOK`. Or it is the result of a custom Function: `ZEROS`. Or it is that of a
    region with such an input.

    Args:
        t: at any level.
        outer: the tracker of the region around, where ``t`` may stand for what has a hook.
    """
    if not t.requires_grad:
        return 0
    if _torch_nodes.has_hooks(t):
        return HOOK
    node, found = made_by((t.grad_fn, 0))[0], 0
    if node is not None and _torch_nodes.is_of_python(node):
        found = getattr(getattr(node, "payload", None), "hooked", ZEROS)
    if found == HOOK or outer is None or (given_for := getattr(outer, "given_for", None)) is None:
        return found
    if (given := given_for(t)) is not None:
        return hooked(given, outer.around())
    if node is None:
        return 0
    # It was computed in the region around, from whatever that was given.
    return max(found, *(hooked(one, outer.around()) for one in outer.given()), 0)


def hides_history(region: Any) -> bool:
    """As what was written to does, and a body that forgets what it computed from."""
    return bool(region.rewritten or region.overwritten or region.options.by_sight)


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
    if not by or hides_history(region) or any(f.holds_duals() for f in region.frames):
        return [([*places], set())]
    told = [hooked(t, region.outer) for t in tensors]
    found = [([*places], set[int]())]
    # Where a hook steps weights in between, the second run would find them changed.
    apart = ZEROS in told and not any(map(_torch_nodes.hooks_after, tensors))
    for least in (HOOK, ZEROS) if apart else (HOOK,):
        those = {i: leaf for i, leaf in enumerate(frame.leaves) if told[i] >= least}
        groups = _groups(frame, those, places)
        if least == HOOK or len(groups) <= max(_FEW, len(found)):
            found = groups
    return found


def _groups(
    frame: Any, those: Mapping[int, int], places: Sequence[int]
) -> list[tuple[list[int], set[int]]]:
    """By what they don't depend on, of some inputs with their leaves."""
    reached_of, inside = frame.region.reached, frame.levels_inside()
    by = reached_of.by
    groups: dict[frozenset[int], list[int]] = {}
    turns: dict[frozenset[int], Any] = {}
    led: dict[frozenset[int], set[int]] = {}
    for place in places:
        own = of_the_body(inside, [place])
        known = all(i < len(by) for i in own)  # what left otherwise than by return is not
        reached = {leaf for i in own for leaf in (by[i] if known else frame.leaves)}
        beyond = frozenset(i for i, leaf in those.items() if leaf not in reached)
        groups.setdefault(beyond, []).append(place)
        turns[beyond] = max(turns.get(beyond, (-1, ())), *map(reached_of.turn, own))
        led.setdefault(beyond, set()).update(reached)
    # No node has an edge to what its results do not depend on: hooks on them are called where
    # something is asked for that they depend on.
    cut = {
        beyond: {i for i, leaf in enumerate(frame.leaves) if leaf not in led[beyond]}
        for beyond in (groups if len(groups) > 1 else ())
        if not led[beyond].isdisjoint(frame.leaves)
    }
    # What is made last runs first. ``NOTE [order of hooks]`` in `_in_turn`.
    return [
        (groups[beyond], cut.get(beyond) or {*beyond})
        for beyond in sorted(groups, key=turns.__getitem__)
    ]


def watch_results(frame: Any, results: Sequence[Tensor | None]) -> None:
    """Raise where a part of a gradient would be taken for it. ``NOTE [part of a gradient]``."""
    region = frame.region
    known = getattr(region.reached, "above", None)
    if (dual := next((f for f in frame.levels_inside() if f.dual()), None)) is not None:
        known = dual.above
    if known:
        watch(known, results, region.options.name)


def has_left(region: Any, left: Iterable[Tensor]) -> None:
    """The same for what left otherwise than by return, which is still on its tape.

    Args:
        region: that it left.
        left: further results, behind the others.
    """
    reached = region.reached
    if isinstance(reached, Reached):
        numbers = [n + reached.start for n in reached.numbers]
        firsts = [n + reached.start for n in reached.firsts]
        left = [*left]
        inside = hung_inside(left, len(firsts))
        reached.inside = {**reached.inside, **inside}
        parts = shifted(reached.parts, reached.start)
        reached.above = with_left(reached.above, numbers, firsts, left, parts)
        further = [_number_of_first(t) - reached.start for t in left]
        reached.firsts = [*reached.firsts, *further]
