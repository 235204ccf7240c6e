"""Run layers with the same code as one ``lax.scan``, which is traced and compiled once.

A run is a sequence of calls of regions with equal graphs. Each operand is shared by all calls,
carried (it is a result of the call before), or stacked (for example a layer's own parameters).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from torch.fx import Graph, GraphModule, Node, map_arg

from functx.compat._to_jax.nodes import (
    CustomFunction,
    attribute,
    body_of,
    is_region,
    modules_of,
    tensors_of,
)
from functx.compat._to_jax.passes.policies import names_of_node
from functx.compat._to_jax.source_lines import at_source

SHARED, STACKED = "shared", "stacked"


@dataclass(frozen=True)
class Layers:
    """A run of calls.

    Attributes:
        calls: the nodes of the regions.
        roles: for each operand: shared, stacked, or the number of the result that it carries.
    """

    calls: tuple[Node, ...]
    roles: tuple[str | int, ...]

    def run(
        self, operands: Sequence[Sequence[Any]], call: Callable[[list[Any], Any], Sequence[Any]]
    ) -> list[tuple[Any, ...]]:
        """The results of all calls.

        Args:
            operands: the operands of each call. For carried operands, only those of the first call
                are read.
            call: makes the first call, with other operands and other numbers of draws.
        """
        draws = [_draws(body_of(node)) for node in self.calls]
        numbers = jnp.asarray([[d.meta["functx_draw"] for d in drawn] for drawn in draws], int)
        places = [place for place, role in enumerate(self.roles) if role == STACKED]
        own = {place: jnp.stack([of_call[place] for of_call in operands]) for place in places}
        carried = {place: role for place, role in enumerate(self.roles) if isinstance(role, int)}

        def layer(state: dict[int, Any], of_layer: Any) -> Any:
            stacked, drawn = of_layer
            of_call = {**dict(enumerate(operands[0])), **stacked, **state}  # ordered by place
            results = call([*of_call.values()], dict(zip(draws[0], drawn)))
            state = {place: results[result] for place, result in carried.items()}
            return state, [r if number in read else None for number, r in enumerate(results)]

        read, start = self._results_read(), {place: operands[0][place] for place in carried}
        last, results = lax.scan(layer, start, (own, numbers))
        found = [[None if r is None else r[i] for r in results] for i in range(len(self.calls))]
        for place, result in carried.items():
            found[-1][result] = last[place]
        return [tuple(f) for f in found]

    def _results_read(self) -> set[Any]:
        """Numbers of results that other nodes read in addition to the next call."""
        return {
            taken.args[1]
            for call, following in zip(self.calls, (*self.calls[1:], None))
            for taken in call.users
            if taken.args[1] not in self.roles
            or (following is not None and {*taken.users} != {following})
        }


def layers_of(graph: Graph) -> tuple[dict[Node, Layers], str]:
    """The runs of layers in a graph.

    Returns:
        The run for each call of a region, and the reason why the first call without a run has none.
    """
    _move_forward(graph)
    order = {node: number for number, node in enumerate(graph.nodes)}
    regions = [n for n in graph.nodes if is_region(n) and not n.meta["functx_region"].replay]
    found: dict[Node, Layers] = {}
    reason = "it has less than two regions" if len(regions) < 2 else ""
    while regions:
        calls, choices = regions[:1], [set[str | int]()]
        for node in regions[1:]:
            why = difference(body_of(calls[0]), body_of(node)) or _options(calls[0], node)
            roles = [] if why else _roles(calls, node, order)
            if len(calls) > 1:
                roles = [a & b for a, b in zip(choices, roles)]
            if why or not all(roles):
                reason = reason or why or "a layer reads what is computed between the layers"
                break
            calls, choices = [*calls, node], roles
        if len(calls) > 1:
            best = [SHARED if SHARED in c else c.pop() for c in choices]
            found |= dict.fromkeys(calls, Layers(tuple(calls), tuple(best)))
        regions = regions[len(calls) :]
    return found, reason


def _move_forward(graph: Graph) -> None:
    """Move nodes that depend on no region (such as copies of buffers) before all regions."""
    first, late = None, set[Node]()
    for node in list(graph.nodes):
        if is_region(node) or node.op == "output" or not late.isdisjoint(node.all_input_nodes):
            first, late = first or node, late | {node}
        elif first is not None:
            first.prepend(node)


def _roles(calls: list[Node], node: Node, order: dict[Node, int]) -> list[set[str | int]]:
    """The possible roles of each operand of a further call."""
    first, last = calls[0], calls[-1]
    found = []
    for one, other in zip(first.args[1:], node.args[1:]):
        can: set[str | int] = {SHARED} if one is other or repr(one) == repr(other) else set()
        if isinstance(one, Node) and isinstance(other, Node):
            if order[other] < order[first]:
                can.add(STACKED)
            if other.target is operator.getitem and other.args[0] is last:
                can.add(other.args[1])  # type: ignore[arg-type]
        found.append(can)
    return found


def _options(one: Node, other: Node) -> str:
    a, b = one.meta["functx_region"], other.meta["functx_region"]
    return "" if a.policy == b.policy else f"{a.name} and {b.name} have different policies"


def _draws(module: GraphModule) -> list[Node]:
    return [n for m in modules_of(module) for n in m.graph.nodes if "functx_draw" in n.meta]


def difference(one: GraphModule, other: GraphModule) -> str:
    """The first difference between two graphs; ``""`` if there is none."""
    same: dict[Node, Node] = {}
    a, b = one.graph.nodes, other.graph.nodes
    if len(a) != len(b):
        return f"one has {len(a)} operations, the other {len(b)}"
    for x, y in zip(a, b):
        same[y] = x
        if not _alike(x, y, same):
            args = [n.args if x.target == y.target else "" for n in (x, y)]
            return f"{x.target}{args[0]}{at_source(x)} is not {y.target}{args[1]}{at_source(y)}"
        if x.op == "get_attr" and (why := _unlike(attribute(x), attribute(y))):
            return why
    return ""


def _unlike(p: Any, q: Any) -> str:
    """The first difference between two bodies of regions, custom Functions, or constants."""
    if isinstance(p, GraphModule) and isinstance(q, GraphModule):
        return difference(p, q)
    if not isinstance(p, CustomFunction) or not isinstance(q, CustomFunction):
        return "" if p is q else "they have different constants"
    # The derivatives of a Function can't read the numbers of draws in a loop.
    if any(map(_draws, p.graphs())):
        return f"{p.name}, a custom autograd.Function, draws random numbers"
    if p.described() != q.described():
        return f"{p.name} is not {q.name}"
    return next(filter(None, map(difference, p.graphs(), q.graphs())), "")


def _alike(x: Node, y: Node, same: dict[Node, Node]) -> bool:
    a, b = ([(t.shape, t.dtype) for t in tensors_of(n)] for n in (x, y))
    if x.op != y.op or a != b:
        return False
    if x.op in ("get_attr", "placeholder"):
        return True
    if is_region(x) and _options(x, y):
        return False
    renamed = map_arg((y.args, y.kwargs), same.__getitem__)
    return (
        x.target == y.target
        and repr((x.args, x.kwargs)) == repr(renamed)
        and names_of_node(x) == names_of_node(y)
        and ("functx_draw" in x.meta) == ("functx_draw" in y.meta)
    )
