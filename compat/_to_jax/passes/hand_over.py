"""What a region keeps by its policy goes to the replays of ``functx.grad`` in the same graph.

A ``functx.grad`` inside a lowered function leaves two regions in the graph: the forward, and
"replay, then pull back".  JAX does not differentiate the pair, so no policy of ``jax.checkpoint``
carries anything from one to the other.  Here the forward gives what its policy keeps as further
results, and the replay takes it in place of computing it again.  It stays on the device also where
a policy asks for host memory, since JAX can't differentiate such moves any further; that warns.

Which of a replay's operations compute it is found by value numbering: equal operations of equal
operands are one value, through the boundaries of regions.  So nothing is assumed about how a replay
was made, and what does not match is recomputed.  ``detach`` is an operation like any other: a value
whose derivative stops is another one than that whose derivative flows.

What a replay still computes again is marked, so that it can be told in a compiled program.
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
from functx.compat._to_jax.passes.policies import kept_values
from functx.compat._to_jax.source_lines import warn

_ALIASES = (torch.ops.aten.alias.default,)
STAYS = (
    "to_jax: what the policy of a region offloads stays on the device where the gradient is taken"
    " inside the lowered function; to have it in host memory take the gradient in JAX:"
    " jax.grad(to_jax(f))"
)
AGAIN = "functx_again"
"""In the ``meta`` of a replay's nodes that compute what a region before it computed."""

Kept = dict[int, tuple[Node, Node]]
"""By number of a value: a region's node, and the node in its body that computes the value."""


def hand_over(module: GraphModule) -> None:
    """Give replays what the regions before them keep, in a functional graph and all its regions."""
    numbering = _Numbering()
    numbering.graph(module, [numbering.fresh() for _ in placeholders(module)])


class _Numbering:
    """Numbers of values: equal numbers are equal values."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._ran: set[int] = set()  # in regions, forward
        self._offloaded: set[int] = set()
        self._count = itertools.count()

    def fresh(self) -> int:
        """The number of a value that is equal to no other."""
        return next(self._count)

    def graph(self, module: GraphModule, operands: Sequence[int]) -> tuple[dict[Node, Any], Any]:
        """Number the values of a graph; in it, hand over what is kept.

        Returns:
            The number of each node (of a region's node, those of its results), and of the results.
        """
        numbers: dict[Node, Any] = dict(zip(placeholders(module), operands, strict=True))
        kept: Kept = {}
        for node in list(module.graph.nodes):
            if node.op == "call_function":
                if is_region(node):
                    numbers[node] = self._region(node, numbers, kept)
                else:
                    numbers[node] = self._operation(node, numbers)
            elif node.op == "get_attr":
                numbers[node] = self.fresh()
            elif node.op == "output":
                return numbers, [numbers.get(x) for x in node.args[0]]
        raise AssertionError("a graph without an output")

    def _region(self, node: Node, numbers: dict[Node, Any], kept: Kept) -> Any:
        body, region = body_of(node), node.meta.get("functx_region")
        operands = [numbers[x] if isinstance(x, Node) else self.fresh() for x in node.args[1:]]
        inner, results = self.graph(body, operands)
        if getattr(region, "replay", False):
            for n, number in inner.items():
                if n.op == "call_function" and isinstance(number, int):
                    n.meta[AGAIN] = number in self._ran
            taken = _take(node, body, inner, kept)
            if not self._offloaded.isdisjoint(taken):
                warn(STAYS)
                self._offloaded.clear()
            return results
        self._ran.update(number for number in inner.values() if isinstance(number, int))
        if (policy := getattr(region, "policy", None)) is not None:
            values = kept_values(body, policy, region.per_example)  # type: ignore[union-attr]
            for value, decision in values.items():
                for part in _parts(value):
                    kept.setdefault(inner[part], (node, part))
                    if decision is Decision.OFFLOAD:
                        self._offloaded.add(inner[part])
        return results

    def _operation(self, node: Node, numbers: dict[Node, Any]) -> Any:
        target: Any = node.target
        if target is operator.getitem:
            source, place = node.args
            found = numbers[source]  # type: ignore[index]
            if isinstance(found, list):  # a region's results
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
            given = _hashable((node.args, node.kwargs), numbers)
            return self._number((target, draw, given))
        except TypeError:  # an argument that can't be compared
            return self.fresh()

    def _number(self, key: Any) -> int:
        return self._known.setdefault(key, next(self._count))


def _hashable(x: Any, numbers: dict[Node, Any]) -> Any:
    if isinstance(x, Node):
        return Node, numbers[x]
    if isinstance(x, tuple | list):
        return tuple(_hashable(v, numbers) for v in x)
    if isinstance(x, dict):
        return tuple((k, _hashable(v, numbers)) for k, v in sorted(x.items()))
    return type(x), repr(x) if isinstance(x, float | complex) else x


def _parts(node: Node) -> Iterator[Node]:
    """The tensors that an operation gives: itself, or the results that are taken out of it."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        yield node
    else:
        yield from (u for u in node.users if u.target is operator.getitem)


def _take(replay: Node, body: GraphModule, inner: dict[Node, Any], kept: Kept) -> list[int]:
    """Let a replay take what is kept as operands; what it then need not compute, goes.

    Gives the numbers of what it takes.
    """
    taken: list[int] = []
    standins: dict[int, Node] = {}
    last = placeholders(body)[-1]
    for node in list(body.graph.nodes):
        number = inner.get(node)
        found = kept.get(number) if isinstance(number, int) and node.op == "call_function" else None
        if found is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if number not in standins:
            with body.graph.inserting_after(last):
                last = body.graph.placeholder(f"kept_{len(standins)}")
            last.meta["val"] = node.meta["val"]
            standins[number] = last  # type: ignore[index]
        node.replace_all_uses_with(standins[number])  # type: ignore[index]
    if not standins:
        return taken
    body.graph.eliminate_dead_code()
    for number, standin in standins.items():
        if standin.users:
            taken.append(number)
            replay.args = (*replay.args, _result(*kept[number]))
        else:
            body.graph.erase_node(standin)
    body.recompile()
    return taken


def _result(region: Node, value: Node) -> Node:
    """A value of a region's body as a result of the region."""
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
