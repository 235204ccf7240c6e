"""The joint graph of a custom Function, cut into its forward and its rule.

The rules of what crosses the cut are told in :mod:`._functions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from functx.compat._to_jax.trace.nodes import modules_of, placeholders

aten = torch.ops.aten
_SAME = (aten.alias.default, aten.detach.default)
FORWARD, RAW = "functx_forward", "functx_raw"


def _forward_nodes(nodes: Sequence[Node], extra: Sequence[Node]) -> set[Node]:
    """What ran before the rule did, and does not depend on its cotangents or tangents."""
    later: set[Node] = set(extra)
    found: set[Node] = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        marked = node.meta.get("custom", {}).get(FORWARD)
        (found if marked and later.isdisjoint(node.all_input_nodes) else later).add(node)
    return found


def _source(node: Node) -> Node:
    """What a node is an alias of."""
    while node.target in _SAME:
        (node,) = node.all_input_nodes
    return node


def cut(
    joint: GraphModule,
    lifted: Sequence[torch.Tensor],
    n_extra: int,
    captures: Sequence[torch.Tensor],
    n_operands: int,
    n_results: int,
) -> tuple[GraphModule, tuple[tuple[str, int], ...], GraphModule]:
    """The rule's graph, what it reads, and the forward's graph with what the rule reads of it."""
    nodes = list(joint.graph.nodes)
    outputs = nodes[-1].args[0]
    inputs = placeholders(joint)
    late = {id(t): p for t, p in zip(lifted, inputs[n_operands + n_extra :])}
    operands = [*inputs[:n_operands], *(late.get(id(t)) for t in captures)]
    extra = inputs[n_operands : n_operands + n_extra]
    results = outputs[:n_results]
    known: dict[Node, tuple[str, int]] = {p: ("operand", i) for i, p in enumerate(operands) if p}
    for i, r in enumerate(results):
        known.setdefault(_source(r), ("result", i))
    middle: list[Node] = []
    reads: dict[tuple[str, int], None] = {}

    def residual(node: Node) -> tuple[str, int]:
        source = _source(node)
        if source not in known:
            known[source] = ("intermediate", len(middle))
            middle.append(source)
        reads.setdefault(known[source])
        return known[source]

    forward = _forward_nodes(nodes, extra)
    late_nodes = [n for n in nodes if n.op == "call_function" and n not in forward]
    live = _live(late_nodes, outputs[n_results:])
    crossing = {
        m
        for n in (*live, *(o for o in outputs[n_results:] if o is not None))
        for m in (n.all_input_nodes if n in live else [n])
        if m not in live and m not in extra and m.op != "get_attr"
    }
    places = {m: residual(m) for m in nodes if m in crossing}
    graph = Graph()
    copies: dict[Any, Node] = {}
    for kind, i in reads:
        copies[kind, i] = graph.placeholder(f"{kind}_{i}")
    for p in extra:
        copies[p] = graph.node_copy(p)

    def of(node: Node) -> Node:
        if node.op == "get_attr" and node not in copies:
            copies[node] = graph.node_copy(node)
        return copies[places[node]] if node in places else copies[node]

    for n in nodes:
        if n in live:
            for m in n.all_input_nodes:
                of(m)
            copies[n] = graph.node_copy(n, of)
    graph.output([None if o is None else of(o) for o in outputs[n_results:]])
    rule = GraphModule(joint, graph)

    graph = Graph()
    made: dict[Node, Node] = {}
    for i, operand in enumerate(operands):
        if operand is None:
            graph.placeholder(f"operand_{i}")
        else:
            made[operand] = graph.node_copy(operand)
    for n in nodes:
        if n.op == "get_attr" or n in forward:
            made[n] = graph.node_copy(n, made.__getitem__)
    graph.output([made[n] for n in (*results, *middle)])
    graph.eliminate_dead_code()
    return rule, tuple(reads), GraphModule(joint, graph)


def _live(nodes: Sequence[Node], outputs: Sequence[Any]) -> set[Node]:
    """Those of some nodes that outputs are computed from."""
    among, live = set(nodes), set()
    stack = [o for o in outputs if o in among]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += [m for m in node.all_input_nodes if m in among]
    return live


def isolate(module: GraphModule) -> None:
    """NOTE [raw operations], for a graph and the bodies in it."""
    for inner in modules_of(module):
        for node in list(inner.graph.nodes):
            if RAW in node.meta:
                _isolate(node, *node.meta.pop(RAW))


def _isolate(node: Node, raw: Sequence[Node], results: Sequence[Node]) -> None:
    inside = set(raw)
    # Several results that are one tensor: the first stands for all.
    gives = {_source(r): i for i, r in reversed(list(enumerate(results)))}
    pieces = {u.args[1]: u for u in node.users}
    for r in raw:
        for user in list(r.users):
            if user in inside or user is node:
                continue
            source = _source(r)
            if source in gives:
                user.replace_input_with(r, pieces[gives[source]])
            elif source not in inside:
                user.replace_input_with(r, source)
            else:
                with node.graph.inserting_before(user):
                    stopped = node.graph.call_function(aten.detach.default, (source,))
                stopped.meta["val"] = source.meta["val"]
                user.replace_input_with(r, stopped)
    node.graph.lint()
