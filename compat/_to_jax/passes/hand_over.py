"""Pass the values that policies save from regions to their replays in the same graph.

A ``functx.grad`` inside a lowered function leaves two regions in the graph: the forward, and
"replay, then pull back". JAX does not differentiate the pair, so a policy of ``jax.checkpoint``
can't pass anything from one to the other. This pass makes the values that the policy saves further
results of the forward, and further operands of the replay, which then need not compute them. The
values stay on the device even if a policy asks for host memory, with a warning, because JAX can't
differentiate such moves again.

The operations of a replay that compute these values are found by value numbering: equal operations
on equal operands have equal values, also across the boundaries of regions. So nothing is assumed
about how a replay was made, and values without a match are recomputed. ``detach`` counts as an
operation, since a value whose derivative stops must not replace one whose derivative flows.

Nodes of a replay that still compute a value again are marked, so that they can be recognised in a
compiled program.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from functx._policies import Decision
from functx._torch.lowering import OpOverload, is_mutable
from functx.compat._to_jax.nodes import body_of, draws, is_region, placeholders
from functx.compat._to_jax.passes.policies import saved_values
from functx.compat._to_jax.source_lines import warn

_ALIASES = (torch.ops.aten.alias.default,)
STAYS = (
    "to_jax: the values that the policy of a region offloads stay on the device, because the"
    " gradient is taken inside the lowered function. To have them in host memory, take the gradient"
    " in JAX: jax.grad(to_jax(f))"
)
AGAIN = "functx_again"
"""A key in the ``meta`` of a replay's nodes: whether the node computes a value again."""

Saved = dict[int, tuple[Node, Node]]
"""By the number of a value: the node of a region, and the node in its body that computes it."""


def hand_over(module: GraphModule) -> None:
    """Pass saved values from regions to later replays, in a functional graph and its regions."""
    numbering = _Numbering()
    numbering.graph(module, [numbering.fresh() for _ in placeholders(module)])


class _Numbering:
    """Gives numbers to values, so that equal numbers mean equal values."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}  # by operation and the numbers of its operands
        self._ran: set[int] = set()  # values that regions compute in their forward
        self._offloaded: set[int] = set()  # values that policies offload
        self._count = itertools.count()

    def fresh(self) -> int:
        """A number for a value that is equal to no other."""
        return next(self._count)

    def graph(self, module: GraphModule, operands: Sequence[int]) -> tuple[dict[Node, Any], Any]:
        """Number the values of a graph, and pass saved values to the replays in it.

        Returns:
            The number of each node (for a region's node, a list for its results), and the numbers
            of the results.
        """
        numbers: dict[Node, Any] = dict(zip(placeholders(module), operands, strict=True))
        saved: Saved = {}
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                if is_region(node):
                    numbers[node] = self._region(node, numbers, saved)
                else:
                    numbers[node] = self._operation(node, numbers)
            elif node.op == "get_attr":
                numbers[node] = self.fresh()
            elif node.op == "output":
                return numbers, [numbers.get(x) for x in node.args[0]]
        raise AssertionError("a graph without an output")

    def _region(self, node: Node, numbers: dict[Node, Any], saved: Saved) -> Any:
        body, region = body_of(node), node.meta.get("functx_region")
        operands = [numbers[x] if isinstance(x, Node) else self.fresh() for x in node.args[1:]]
        inner, results = self.graph(body, operands)
        if getattr(region, "replay", False):
            for n, number in inner.items():
                if n.op == "call_function" and isinstance(number, int):
                    n.meta[AGAIN] = number in self._ran
            taken = _take(node, body, inner, saved)
            if not self._offloaded.isdisjoint(taken):
                warn(STAYS)
                self._offloaded.clear()
            return results
        self._ran.update(number for number in inner.values() if isinstance(number, int))
        if (policy := getattr(region, "policy", None)) is not None:
            values = saved_values(body, policy, region.per_example)  # type: ignore[union-attr]
            for value, decision in values.items():
                for part in _parts(value):
                    saved.setdefault(inner[part], (node, part))
                    if decision is Decision.OFFLOAD:
                        self._offloaded.add(inner[part])
        return results

    def _operation(self, node: Node, numbers: dict[Node, Any]) -> Any:
        target: Any = node.target
        if target is operator.getitem:
            source, place = node.args
            found = numbers[source]  # type: ignore[index]
            if isinstance(found, list):  # the results of a region
                return found[place]  # type: ignore[index]
            return self._number((target, found, place))
        if target in _ALIASES:
            return numbers[node.args[0]]  # type: ignore[index]
        draw = node.meta.get("functx_draw")
        if not isinstance(target, OpOverload) or is_mutable(target):
            return self.fresh()
        if draws(target, node.args) and draw is None:
            return self.fresh()
        try:
            arguments = _hashable((node.args, node.kwargs), numbers)
            return self._number((target, draw, arguments))
        except TypeError:  # an argument is not hashable
            return self.fresh()

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, next(self._count))


def _hashable(x: Any, numbers: dict[Node, Any]) -> Any:
    if isinstance(x, Node):
        return Node, numbers[x]
    if isinstance(x, tuple | list):
        return tuple(_hashable(v, numbers) for v in x)
    if isinstance(x, dict):
        return tuple((k, _hashable(v, numbers)) for k, v in sorted(x.items()))
    return type(x), repr(x) if isinstance(x, float | complex) else x


def _parts(node: Node) -> Iterator[Node]:
    """The nodes for the tensors that an operation returns: itself, or its ``getitem`` users."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        yield node
    else:
        yield from (u for u in node.users if u.target is operator.getitem)


def _take(replay: Node, body: GraphModule, inner: dict[Node, Any], saved: Saved) -> list[int]:
    """Make saved values operands of a replay, and remove the nodes that it no longer needs.

    Returns the numbers of these values.
    """
    taken: list[int] = []
    standins: dict[int, Node] = {}
    last = placeholders(body)[-1]
    for node in list(body.graph.nodes):
        number = inner.get(node)
        is_value = isinstance(number, int) and node.op == "call_function"
        found = saved.get(number) if is_value else None  # type: ignore[arg-type]
        if found is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if number not in standins:
            with body.graph.inserting_after(last):
                last = body.graph.placeholder(f"saved_{len(standins)}")
            last.meta["val"] = node.meta["val"]
            standins[number] = last  # type: ignore[index]
        node.replace_all_uses_with(standins[number])  # type: ignore[index]
    if not standins:
        return taken
    body.graph.eliminate_dead_code()
    for number, standin in standins.items():
        if standin.users:
            taken.append(number)
            replay.args = (*replay.args, _result(*saved[number]))
        else:
            body.graph.erase_node(standin)
    body.recompile()
    return taken


def _result(region: Node, value: Node) -> Node:
    """Make a value in the body of a region a result of the region; returns its node."""
    (output,) = (n for n in value.graph.nodes if n.op == "output")
    results = list(output.args[0])
    place = results.index(value) if value in results else len(results)
    for user in region.users:
        if user.target is operator.getitem and user.args[1] == place:
            return user
    if place == len(results):
        output.args = ((*results, value),)
        body_of(region).recompile()
    with region.graph.inserting_after(region):
        taken = region.graph.call_function(operator.getitem, (region, place))
    taken.meta["val"] = value.meta["val"]
    return taken
