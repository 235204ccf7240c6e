"""Results of a region that other results of it are computed from: whose gradient is a part.

NOTE [part of a gradient]
All results of a region are behind one node. What flows to ``h`` in ``h, y = remat(f)(x)`` is what
comes from outside; what comes by ``y``, if the body computes that from ``h``, is added up in the
replay, where no hook of the user's is. So a hook on such a result, its ``.grad`` and a gradient
with respect to it would be a part of what they are without remat. Each such result has a hook of
the engine's, before any of the user's, which raises where somebody looks at it and another one is
pulled back in the same pass.

What left a region otherwise than by return counts as well; and what it has written to, which has a
node of its own: ``NOTE [follows]`` in `_follows`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_nodes
from functx._errors import RematError
from functx._remat._follows import made_by
from functx._remat._tapes import edges_of, nodes_of, tape_below
from functx._torch import sequence_number
from functx._torch_edges import has_hooks_of_users
from functx._torch_modules import frame_above, frames_of_threads

_LATEST = 8

Above = Mapping[int, Iterable[int]]
"""By the place of a result, those of the results that are computed from it."""


def above(results: Sequence[Tensor | None], nodes: Iterable[Any]) -> Above:
    """Which results are computed from which others.

    Args:
        results: with their tapes.
        nodes: all that is on these.
    """
    edges = {edge: i for i, r in enumerate(results) for edge in edges_of(r)}
    if len({*edges.values()}) < 2:
        return {}
    inner = {key: i for edge, i in edges.items() if (key := place_inside(edge)) is not None}
    used = {edge for node in nodes for edge in node.next_functions}
    below = used & edges.keys()
    through = {edge for edge in used | edges.keys() if inner and _computed_from(edge)}
    found: dict[int, set[int]] = {}
    for j, r in enumerate(results) if below or through else ():
        walked = [edge for node in tape_below(nodes_of([r]))[0] for edge in node.next_functions]
        for edge in walked:
            if edge in below and edges[edge] != j:
                found.setdefault(edges[edge], set()).add(j)
        for edge in (*edges_of(r), *walked):
            for key in _computed_from(edge) if edge in through else ():
                if (i := inner.get(key, j)) != j:
                    found.setdefault(i, set()).add(j)
    return found


def place_inside(edge: tuple[Any, int]) -> tuple[int, int] | None:
    """Of a result of a region inside: which one."""
    edge = made_by(edge)
    payload = getattr(edge[0], "payload", None)
    if payload is None or edge[1] >= len(payload.places):
        return None
    return id(payload.region), payload.places[edge[1]]


def _computed_from(edge: tuple[Any, int]) -> list[tuple[int, int]]:
    """The results of a region inside from which it computes another one of its."""
    key = place_inside(edge)
    if key is None:
        return []
    known = getattr(made_by(edge)[0].payload.region.reached, "above", {})
    return [(key[0], i) for i, those in known.items() if key[1] in those]


Parts = Set[tuple[int, int]]
"""Results of regions inside: the number of the first node that the region might have made, and
which of its results."""


def parts_of(result: Tensor | None) -> tuple[Parts, Parts]:
    """Which results of regions inside a result is, at all levels, and those it is computed from."""
    own: set[tuple[int, int]] = set()
    found: set[tuple[int, int]] = set()
    for edge in edges_of(result):
        those = _parts_of_edge(edge)
        own.update(those[:1])
        found.update(those[1:])
    for node in tape_below(nodes_of([result]))[0]:
        for edge in node.next_functions:
            found.update(_parts_of_edge(edge))
    return own, found - own


def shifted(parts: Iterable[tuple[Parts, Parts]], by: int) -> list[tuple[Parts, Parts]]:
    """The same, where nodes have other numbers."""
    return [({(n + by, i) for n, i in a}, {(n + by, i) for n, i in b}) for a, b in parts]


def has_parts(nodes: Iterable[Any]) -> bool:
    """Whether one of some nodes is that of a region with several results."""
    payloads = (getattr(node, "payload", None) for node in nodes)
    return any(one is not None and len(one.places) > 1 for one in payloads)


def _parts_of_edge(edge: tuple[Any, int]) -> list[tuple[int, int]]:
    """The one that it is, and those from which the region computes that."""
    if (key := place_inside(edge)) is None:
        return []
    number = made_by(edge)[0].payload.region.began
    return [(number, key[1]), *((number, i) for _, i in _computed_from(edge))]


def with_left(
    known: Above,
    numbers: Sequence[int],
    results: Sequence[int],
    left: Sequence[Tensor],
    parts: Sequence[tuple[Parts, Parts]] = (),
) -> Above:
    """`above`, with tensors that left otherwise, in places behind those of the results.

    Args:
        known: of the results.
        numbers: of all nodes below others on their tapes, which are gone.
        results: the numbers of the nodes of each.
        left: what left.
        parts: of the results, if regions inside have made any of these.
    """
    found = {place: {*those} for place, those in known.items()}
    n = len(results)
    for i, t in enumerate(left):
        if not (nodes := nodes_of([t])):  # it stands for an argument: NOTE [stored arguments]
            found.setdefault(n + i, set()).update({*range(n), n + i})
            continue
        below = {*map(sequence_number, tape_below(nodes)[0][len({*nodes}) :])}
        for place, number in enumerate(results):
            if number in below:
                found.setdefault(place, set()).add(n + i)
        if any(sequence_number(node) in numbers for node in nodes_of([t])):
            # Of which of them, nobody knows any more.
            found.setdefault(n + i, set()).update(range(n))
        for k, other in enumerate(left):
            if k != i and any(sequence_number(node) in below for node in nodes_of([other])):
                found.setdefault(n + k, set()).add(n + i)
    nothing = set[tuple[int, int]](), set[tuple[int, int]]()
    each = [*(parts or [nothing] * n), *map(parts_of, left)]
    for i, (own, _) in enumerate(each):  # of those that share a node the numbers tell nothing
        for j, (_, others) in enumerate(each):
            if max(i, j) >= n and i != j and not own.isdisjoint(others):
                found.setdefault(i, set()).add(j)
    return found


def watch(those: Above, results: Sequence[Tensor | None], name: str) -> None:
    """Hang a hook on results of a node that others are computed from, and on those."""
    passes = _Passes()
    places = {*those}.union(*those.values())
    with _torch.without_modes():
        # A node's hooks run in the order in which they were hung: first those of the last.
        for place in sorted(places, key=lambda place: len([*those.get(place, ())])):
            t = results[place]
            if t is not None and t.grad_fn is not None:
                t.register_hook(_Pulled(passes, place))
                if place in those:
                    t.register_hook(Watcher(t, place, [*those[place]], passes, name))


class _Passes:
    """Which results had a cotangent in the backward passes under way."""

    def __init__(self) -> None:
        self._pulled: dict[int, set[int]] = {}

    def note(self, place: int) -> None:
        """It has one."""
        passing = self._pulled.setdefault(_torch.current_graph_task_id(), set())
        passing.add(place)
        while len(self._pulled) > _LATEST:
            self._pulled.pop(next(iter(self._pulled)), None)

    def any_of(self, places: Iterable[int]) -> bool:
        """Whether one of those has."""
        return not self._pulled.get(_torch.current_graph_task_id(), set()).isdisjoint(places)


class _Pulled(_torch_nodes.EngineHook):
    def __init__(self, passes: _Passes, place: int) -> None:
        self._passes = passes
        self._place = place

    def __call__(self, cotangent: Tensor | None) -> None:
        if cotangent is not None:
            self._passes.note(self._place)


class Looker:
    """Tells how somebody looks at a result in the backward pass under way."""

    def __init__(self, t: Tensor) -> None:
        # Known weakly, or the node would hold itself, and what its function holds.
        payload = getattr(made_by((t.grad_fn, 0))[0], "payload", None)
        self._payload = None if payload is None else weakref.ref(payload)
        self._shape = tuple(t.shape)
        self.is_on(t)

    def is_on(self, t: Tensor) -> None:
        """It is another tensor now, or on another tape."""
        self._edge = id(t.grad_fn), t.output_nr
        self._result = weakref.ref(t)
        self._hooks = weakref.ref(_torch_nodes.hooks_of(t))

    def looks(self) -> str | None:
        """How, in words; ``None`` if nobody does."""
        t = self._result()
        if _torch_nodes.has_users_hook(self._hooks()):
            return "it has a hook"
        if t is not None and t.retains_grad and (id(t.grad_fn), t.output_nr) == self._edge:
            return "its gradient is retained"
        if self.is_asked_for():
            return "its gradient is asked for"
        if getattr(self._payload and self._payload(), "watched", False):
            return "the node that they share has a hook"
        return None

    def is_asked_for(self) -> bool:
        """Whether the pass hands out its gradient."""
        return is_asked_for(*self._edge)


class Watcher(Looker, _torch_nodes.EngineHook):
    """Raises where somebody looks at a part of a gradient. ``NOTE [part of a gradient]``."""

    def __init__(
        self, t: Tensor, place: int, others: Sequence[int], passes: _Passes, name: str
    ) -> None:
        super().__init__(t)
        self.place = place
        self.others = others
        self._passes = passes
        self._name = name

    def __call__(self, cotangent: Tensor | None) -> None:
        if self._passes.any_of(self.others):
            self.look([self])

    def look(self, those: Iterable[Looker], nodes: Iterable[Any] = ()) -> None:
        """Others are pulled back.

        Args:
            those: who may be looked at.
            nodes: further ones, of torch's own, on which hooks may hang.
        """
        how = next(filter(None, (one.looks() for one in those)), None)
        if how is None and any(map(has_hooks_of_users, nodes)):
            how = "its node has a hook"
        if how is None:
            return
        if self.place in self.others:
            raise RematError(
                f"remat: the region {self._name!r} stores an argument of shape {self._shape} where "
                f"functx does not find it, and {how}: what is there is an alias of the caller's "
                "tensor, which would be given a part. Store it in an attribute, a list or a dict, "
                "or look at the caller's tensor."
            )
        raise RematError(
            f"remat: the region {self._name!r} has a result of shape {self._shape} from which it "
            f"computes another one, both are pulled back, and {how}: it would be given the part "
            "that comes from outside of the region. Hang the hook on it inside of the region, or "
            "let the region end there, and compute the other one in a further region."
        )


_ASKING: dict[Any, Callable[[FrameType], tuple[Any, Any]]] = {
    torch.autograd.grad.__code__: lambda frame: (
        frame.f_locals.get("outputs"),
        frame.f_locals.get("inputs"),
    ),
    torch.autograd.backward.__code__: lambda frame: (
        frame.f_locals.get("tensors"),
        frame.f_locals.get("inputs"),
    ),
    _torch.run_backward.__code__: lambda frame: (
        frame.f_locals["args"][0],
        frame.f_locals["args"][4],
    ),
}


_ONE = (Tensor, torch.autograd.graph.GradientEdge)


def passes_under_way() -> Iterator[tuple[list[tuple[Any, int]], list[tuple[Any, int]]]]:
    """The edges that a backward pass began with, and those that it hands out.

    Torch does not tell. The function that began the pass does, by what it was called with: it is on
    this thread's stack, or where the engine has a thread for a device, on another one's: then those
    of all threads.
    """
    frame: FrameType | None = frame_above(1)
    while frame is not None:
        if (of := _ASKING.get(frame.f_code)) is not None:
            began, asked = of(frame)
            yield _edges(began), _edges(asked)
            return
        frame = frame.f_back
    for frame in frames_of_threads():
        while frame is not None:
            if (of := _ASKING.get(frame.f_code)) is not None:
                began, asked = of(frame)
                yield _edges(began), _edges(asked)
            frame = frame.f_back


def is_asked_for(node: int, place: int) -> bool:
    """Whether the backward pass under way hands out what comes to a place of a node."""
    return any(
        id(one) == node and n == place for _, asked in passes_under_way() for one, n in asked
    )


def _edges(those: Any) -> list[tuple[Any, int]]:
    with _torch.without_modes():
        return [
            (one.grad_fn, one.output_nr) if isinstance(one, Tensor) else (one[0], one[1])
            for one in ((those,) if isinstance(those, _ONE) else those or ())
        ]
