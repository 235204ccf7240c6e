"""Results of a region that its own pullback reads: a second derivative flows to them as well.

NOTE [read results]
Without remat the pullback of ``y = exp(x)`` reads ``y``. So in a second backward pass something
flows from the gradient of ``x`` to ``y``, where hooks see it, and from there to ``x``. The pullback
of a region computes ``y`` anew, so all of it would flow to ``x`` right away: the same gradients,
but a hook on ``y``, its ``.grad`` and a gradient with respect to it would lack that part. So the
node of a pullback has edges to the results that the pullback's tape leads to. The engine comes by
them with nothing where nobody looks. Where somebody does, the tape of the replay is cut there, and
what comes to the cut is handed on by the edge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from functx import _torch, _torch_nodes
from functx._errors import RematError
from functx._remat._follows import made_by
from functx._remat._packed import Packed, packed_by
from functx._remat._partial import is_asked_for, place_inside
from functx._remat._tapes import edges_of
from functx._torch import sequence_number

Slot = tuple[Any, int]
"""A region, and the place of one of its results."""


class _Running(threading.local):
    of: Any = None  # the innermost function that is being replayed for a derivative


_running = _Running()
_NONE = -1  # a place that no result has


class Replayed:
    """A function that is replayed on a tape from which derivatives may be taken.

    Args:
        fn: the function, as some level of a region sees it.
        region: the region.
        level: whose function it is.
        cut: what is told where the tapes of results begin.

    Attributes:
        read: the results that the tape of the pullback leads to.
        hung: the hooks of the latest run, each by its handle there. ``NOTE [taken off]``.
    """

    read: Collection[Slot] = ()
    hung: Sequence[tuple[Any, Any]] = ()
    _then: Any = None

    def __init__(self, fn: Callable[..., Any], region: Any, level: int, cut: Cut | None) -> None:
        self._fn = fn
        self.level = level
        self._region = region
        self._cut = cut
        self._inner = getattr(region.body, "fn", None)
        self._within: list[tuple[Slot, Any, Any]] = []
        self._holds = False
        self._marks: dict[Any, Slot] | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Run it; where the tapes of its results begin is remembered."""
        outer, _running.of = _running.of, self
        within = outer if isinstance(outer, Replayed) and outer._inner is self else None
        self._holds = self._cut is not None or (within is not None and within._holds)
        try:
            outs = self._fn(*inputs)
        finally:
            _running.of = outer
        found, self._within = self._within, []
        found += [((self._region, i), edge, o) for i, o in enumerate(outs) for edge in edges_of(o)]
        if self._marks is None:  # it is the first run
            self._marks = {(sequence_number(node), n): slot for slot, (node, n), _ in found}
            inside = ((place_inside(edge), slot) for slot, edge, _ in found)
            self._marks.update({(key,): slot for key, slot in inside if key is not None})
            packed = ((_packed_inside(edge), slot) for slot, edge, _ in found)
            self._marks.update({(key,): slot for key, slot in packed if key is not None})
        if within is not None:
            # A region inside makes edges only to results that are there.
            within._within += found if self._holds else [(*of, None) for *of, _ in found]
        if self._cut is not None:
            self._cut.at(found)
        return outs

    def remembered(self, now: Any) -> Any:
        """What there is of hooks in this run: as it was in the first one, which this may be."""
        if self._marks is None:
            self._then = now
        return self._then

    def look(self, nodes: Sequence[Any], results: Iterable[Tensor | None]) -> None:
        """The tapes of the gradients, of the first run, are these."""
        marks, self._marks = self._marks, {}
        if not marks:
            return
        edges = {edge for node in nodes for edge in node.next_functions if edge[0] is not None}
        edges.update(edge for r in results for edge in edges_of(r))
        keys: set[Any] = {(sequence_number(node), n) for node, n in edges}
        for node in nodes:  # of pullbacks of regions inside, whose results may be gone
            those = getattr(getattr(node, "payload", None), "read", ())
            keys.update(((id(region), place),) for region, place in those)
        # Under the older vmap no tape is seen.
        self.read = {marks[key] for key in (keys & marks.keys() if nodes else marks)}


def being_replayed(region: Any) -> Replayed | None:
    """The function that a region is replayed for, where a derivative may be taken of that."""
    of = _running.of
    return of if isinstance(of, Replayed) and of._region is region else None


def _packed_inside(edge: tuple[Any, int]) -> Slot | None:
    """A region inside, for the alias of a result of it that a dual was made of."""
    below = edge[0].next_functions
    key = place_inside(below[0]) if len(below) == 1 else None
    return None if key is None else (key[0], _NONE)


def read_by(frame: Any) -> Mapping[Slot, bool]:
    """The results of another region that the pullback of it, which this one is, reads.

    Args:
        frame: a level of this one.

    Returns:
        Each, with whether it has a hook now, which may be gone with its tape later.
    """
    region = frame.region
    fn = getattr(region.body, "fn", None)
    if not isinstance(fn, Replayed):
        return {}
    if _across_duals(fn, frame):
        return dict.fromkeys({(of, _NONE) for of, _ in fn.read}, False)
    return {slot: _has_hooks(slot, frame.level) for slot in fn.read}


def _across_duals(fn: Replayed, frame: Any) -> bool:
    """Whether a result of the other region is two here: a level between is of forward mode."""
    return any(f.dual() and f.level < fn.level for f in frame.levels_inside())


def packed_in(read: Mapping[Slot, bool], level: int) -> list[Packed]:
    """``NOTE [packed]`` in `_packed`."""
    return packed_by({region for region, place in read if place == _NONE}, level)


def still_there(slots: Collection[Slot], level: int) -> list[Tensor]:
    """Those of some results that somebody holds, as one level knows them."""
    return [t for slot in slots if (t := _result(slot, level)) is not None]


def _result(slot: Slot, level: int) -> Tensor | None:
    """A result, as one level knows it, if it is still there and what it was."""
    region, place = slot
    ref = region.taped.get(level, {}).get(place)
    t = None if ref is None else ref()
    if t is None or place_inside((t.grad_fn, t.output_nr)) != (id(region), place):
        return None
    return t


def looked_at(payload: Any, edges: Sequence[Any]) -> Cut | None:
    """Where to cut the replay of a pullback, if somebody looks at results that it reads.

    Args:
        payload: of the node of the pullback.
        edges: of the node, to the results.
    """
    slots: dict[Any, Slot] = {(id(slot[0]), slot[1]): slot for slot in payload.read}
    those = [slots.pop(place_inside(edge), None) for edge in edges]
    looked = [
        slot if slot is not None and _is_looked_at(edge, slot, payload.level) else None
        for edge, slot in zip(edges, those)
    ]
    gone = [s for s in slots.values() if _has_hooks(s, payload.level, payload.read[s])]
    return Cut(looked, gone) if gone or any(looked) else None


def _has_hooks(slot: Slot, level: int, had: bool = False) -> bool:
    region, place = slot
    hooks = region.hung.get((level, place), _never)()
    return had if hooks is None else _torch_nodes.has_users_hook(hooks)


def _never() -> None:
    """No hook was hung there."""


def _is_looked_at(edge: tuple[Any, int], slot: Slot, level: int) -> bool:
    if made_by(edge)[0].payload.watched or _has_hooks(slot, level):
        return True
    if is_asked_for(id(edge[0]), edge[1]):
        return True
    t = _result(slot, level)
    return t is not None and t.retains_grad


class Cut:
    """Cuts the tape of a replay at some results. ``NOTE [read results]``.

    Args:
        slots: the results; ``None`` for edges that get nothing.
        gone: further ones, to which nothing can be handed on.
    """

    def __init__(self, slots: Sequence[Slot | None], gone: Sequence[Slot]) -> None:
        self._slots = [*slots, *gone]
        self._edges = len(slots)
        self._found: list[tuple[Any, int, int]] = []

    def at(self, found: Iterable[tuple[Slot, Any, Any]]) -> None:
        """The tapes of results begin there."""
        self._found = [
            (node, place, self._slots.index(slot))
            for slot, (node, place), _ in found
            if slot in self._slots
        ]

    def around(self, pull_back: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Pull back with the tape cut: what comes to the cuts is behind the gradients."""
        found, self._found = self._found, []
        parts: list[Any] = [None] * len(self._slots)
        hooks = []
        for node, place, n in found:
            # A custom Function would be handed zeros, and its derivative may be infinite.
            whole = n >= self._edges or (
                _torch_nodes.is_of_python(node)
                and not hasattr(made_by((node, place))[0], "payload")
            )
            hooks.append(_Hook(place, self._slots[n], whole, n, parts))
        for (node, _, _), hook in zip(found, hooks):
            if hasattr(of := made_by((node, 0))[0], "payload"):
                of.payload.watched = True
            _torch_nodes.hang_before(node, hook)

        def cutting(*args: Any, **kwargs: Any) -> list[Any]:
            try:
                gradients = pull_back(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.parts = None
            those = parts[: self._edges]
            return [*gradients, *(None if p is None else _torch.unwrap_if_dead(p) for p in those)]

        return cutting


class _Hook:
    """Before a node: takes what comes to one of its results, or refuses where it can't."""

    def __init__(self, place: int, slot: Any, whole: bool, n: int, parts: list[Any]) -> None:
        self._place, self._slot, self._whole, self._n = place, slot, whole, n
        self.parts: list[Any] | None = parts

    def __call__(self, cotangents: tuple[Tensor | None, ...]) -> Any:
        part = cotangents[self._place]
        if part is None or self.parts is None:
            return None
        if self._whole:
            if _torch.is_wrapped(part) or part.count_nonzero():
                raise _refused(self._slot)
            return None
        self.parts[self._n] = part
        return (*cotangents[: self._place], None, *cotangents[self._place + 1 :])


def _refused(slot: Slot) -> RematError:
    name = slot[0].options.name
    return RematError(
        f"remat: a second derivative flows to a result of the region {name!r}, which its pullback "
        "reads, and somebody looks at that: the result has a hook, its gradient is retained or "
        "asked for. What flows there can't be handed on, since nobody has held the result to the "
        "first backward pass, or it comes right from a custom Function. Hold the result till then, "
        "or hang the hook inside of the region, or let the region return result.clone()."
    )
