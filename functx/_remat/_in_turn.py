"""Hooks on several results of a region: called in the order in which torch's engine would.

NOTE [order of hooks]
The engine runs nodes in the reverse of the order in which they were made. So of hooks on several
results those of the last one run first, whichever was hung first; only of results of one operation
(`unbind`) it is that of hanging them. The results of a region share its node, whose hooks run as
they were hung. So they are not hung on the node: each result there is gets two of the engine's own.
The first ones take what flows to each, the last of them calls the user's, those of the result that
was made last first, and the second ones hand on what these made of it.

A view of an input has a node that is not the region's, made anew after that. It is numbered as if
it was made before, where all results were made after the view in the body. What one turn for all
results can't tell apart is a view that was made between two of them. The hooks of an input that was
written to run before those of results; and where results have nodes of their own, one node's run
after the other's. Hooks inside of the region run in its replay, after all of these.

NOTE [passed by]
Where a backward pass asks for some gradients only, the engine comes by the results below which is
something that is asked for. So hooks on the others are not called, and what waits for hooks on
several results is told that nothing comes there. What is computed from a result outside is above
the node, and come by where anything is below that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from operator import and_
from typing import Any

from torch import Tensor

from functx import _torch, _torch_nodes
from functx._remat._one_by_one import of_the_body
from functx._remat._partial import is_asked_for
from functx._remat._tapes import edges_of, leaf_of, nodes_of


class _InTurn:
    """The hooks on the results of one node.

    Compiled autograd calls each hook of each tensor when it likes, which is when it has been given
    the node: hooks then are of one tensor, as they are without remat.

    Args:
        node: of several results.
        hang: hangs a dict of hooks on one of them.
    """

    compiled = False

    def __init__(self, node: Any, hang: Callable[[Tensor, dict[int, Any]], None]) -> None:
        payload = node.payload
        self._node = weakref.ref(node)
        self._hung: list[tuple[Any, int, Mapping[int, Any]]] = []
        self._passes: dict[int, dict[int, Any]] = {}  # by backward pass, what flows to each
        self.names: dict[int, str] = {}  # of the hooks that made of it what is handed on
        known = payload.region.taped.get(payload.level, {})
        held = ((n, known[place]()) for n, place in enumerate(payload.places) if place in known)
        results = {n: t for n, t in held if t is not None and t.grad_fn is node}
        self._results = {*results}
        last = max(results, default=0)
        for n, t in results.items():
            hang(t, {0: functools.partial(self._take, n, n == last)})
        for n, t in results.items():
            hang(t, {0: _Give(self, n, n == last)})

    def add(self, n: int, turn: Any, hooks: Mapping[int, Any]) -> bool:
        """A result has hooks from now on; not if it was not there."""
        if n not in self._results:
            return False
        self._hung.append((turn, n, hooks))
        self._hung.sort(key=lambda one: one[0], reverse=True)  # of one operation, as they were hung
        return True

    def _take(self, n: int, last: bool, gradient: Tensor | None) -> Tensor | None:
        if self.compiled:
            return self._alone(n, gradient)
        backward = _torch.current_graph_task_id()
        given = self._passes.setdefault(backward, {})
        given[n] = gradient
        if not last:
            return None
        try:
            passed_by = self._passed_by()
            for _, i, hooks in [*self._hung]:
                for hook in [*hooks.values()]:
                    if i in passed_by and not isinstance(hook, _torch_nodes.EngineHook):
                        if _torch_nodes.is_of_several(hook):
                            hook(None)  # it counts those whose node runs
                        continue
                    if (other := hook(given[i])) is not None:
                        given[i] = other
                        self.names[i] = getattr(hook, "__name__", "<unknown>")
        except BaseException:
            self._passes.pop(backward, None)
            raise
        return None

    def _alone(self, n: int, gradient: Tensor | None) -> Tensor | None:
        """What the hooks of one result make of its gradient."""
        for _, i, hooks in self._hung:
            for hook in [*hooks.values()] if i == n else ():
                if (other := hook(gradient)) is not None:
                    gradient = other
        return gradient

    def _passed_by(self) -> Set[int]:
        """The results that the engine would not come by, if they had nodes of their own.

        These are not asked for themselves, and below them is nothing that is.
        """
        node = self._node()
        if node is None:
            return frozenset()
        payload = node.payload
        edges = [below for below, _ in node.next_functions]
        reached = [*map(_torch.will_be_reached, edges)]
        if all(r for r, below in zip(reached, edges) if below is not None) and any(reached):
            return frozenset()
        found = set()
        for n in range(len(payload.places)):
            if not any(map(and_, reached, leading(node, n))) and not is_asked_for(id(node), n):
                found.add(n)
        return found if len(found) < len(payload.places) else frozenset()

    def give(self, n: int, last: bool, gradient: Tensor | None) -> Tensor | None:
        """What the hooks have made of a gradient, if it is another one."""
        if self.compiled:
            return None
        backward = _torch.current_graph_task_id()
        given: Tensor | None = self._passes[backward][n]
        if last:
            del self._passes[backward]
        return None if given is gradient else given


class _Give:
    """Hands on what hooks have made of a gradient; torch looks whether it is like that."""

    def __init__(self, of: _InTurn, n: int, last: bool) -> None:
        self._of, self._n, self._last = of, n, last

    @property
    def __name__(self) -> str:
        return self._of.names.get(self._n, "<unknown>")

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return self._of.give(self._n, self._last, gradient)


def leading(node: Any, n: int) -> Sequence[bool]:
    """For each edge of a region's node, whether one of its results leads there."""
    payload, edges = node.payload, len(node.next_functions)
    if payload.leaves:
        own = of_the_body(payload.frames, [payload.places[n]])
        leads = payload.region.reached.leads_of(own)
        if leads is not None:
            inputs = [leaf in leads for leaf in payload.leaves]
            return [*inputs, *[True] * (edges - len(inputs))]  # others are for any
    return [True] * edges


def leaves_of_each(results: Sequence[Tensor | None]) -> list[Set[int]]:
    """The ids of the leaves that the tape of each of some tensors ends in; all is seen once."""
    found: dict[Any, Set[int]] = {}
    each: list[Set[int]] = []
    for result in results:
        first = [*map(part_of, edges_of(result))]
        stack = [*first]
        while stack:
            part = stack[-1]
            node, n = part
            below = [*map(part_of, edges_of_part(node, n))] if part not in found else []
            if left := [one for one in below if one not in found]:
                stack += left
                continue
            if part not in found:
                own = set[int]() if (leaf := leaf_of(node)) is None else {id(leaf)}
                found[part] = own.union(*map(found.__getitem__, below))
            stack.pop()
        each.append(set[int]().union(*map(found.__getitem__, first)))
    return each


def part_of(edge: tuple[Any, int]) -> tuple[Any, int]:
    """A node; of a region's that has several results, the part that one of them belongs to."""
    payload = getattr(edge[0], "payload", None)
    return edge if payload is not None and payload.leaves else (edge[0], -1)


def edges_of_part(node: Any, n: int) -> list[tuple[Any, int]]:
    edges = [*node.next_functions]
    if n >= 0:
        edges = [edge for edge, leads in zip(edges, leading(node, n)) if leads]
    return [edge for edge in edges if edge[0] is not None]


def hung(node: Any, t: Tensor, hooks: Any, hang: Any) -> bool:
    """A result of a region's node has its first hook; answers whether that is hung here.

    Args:
        node: of the region.
        t: the result.
        hooks: the dict of its hooks.
        hang: hangs a dict of hooks on a result.
    """
    payload, n = node.payload, t.output_nr
    region, places = payload.region, payload.places
    # Weakly: hooks of the engine's own know the region.
    region.hung = {**region.hung, (payload.level, places[n]): weakref.ref(hooks)}
    if len(places) == 1:
        return False
    in_turn = None if payload.in_turn is None else payload.in_turn()
    if in_turn is None:
        in_turn = _InTurn(node, hang)
        payload.in_turn = weakref.ref(in_turn)
    return in_turn.add(n, turn_of(payload, n), hooks)


def each_alone(node: Any) -> None:
    """The hooks on results of a region's node are to be called by compiled autograd."""
    in_turn = node.payload.in_turn and node.payload.in_turn()
    if in_turn is not None:
        in_turn.compiled = True


def turn_of(payload: Any, n: int) -> Any:
    """When a result of a node was made, to be compared with others of that node."""
    those = of_the_body(payload.frames, [payload.places[n]])
    return max(map(payload.region.reached.turn, those))


def viewed_again(
    base: Tensor, view: Tensor, results: Sequence[Tensor | None], reached: Any
) -> Tensor:
    """The view of ``base`` that a body has handed back. ``NOTE [order of hooks]``.

    Args:
        base: an input.
        view: of what stood for it in the body.
        results: of the region.
        reached: when they were made.
    """
    again = _torch.view_again(view, _torch.unwrap_if_dead(base))
    made = [*map(_torch.sequence_number, nodes_of([view])[:1])]
    firsts = [n for n in getattr(reached, "firsts", ()) if n >= 0]
    nodes = nodes_of(results)
    if made and firsts and nodes and made[0] < min(firsts):
        before = min(map(_torch.sequence_number, nodes)) - 1  # a number of the body's run
        for node in nodes_of([again]):
            _torch_nodes.number(node, before)
    return again
