"""What the nodes of a lowered function's graph are: operations, regions, custom Functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from functx.compat._to_jax.trace.custom_function import CustomFunction


def attribute(node: Node) -> Any:
    """What a ``get_attr`` node gets."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _callee(node: Node) -> Any:
    first = node.args[0] if node.op == "call_function" and node.args else None
    return attribute(first) if isinstance(first, Node) and first.op == "get_attr" else None


def is_region(node: Node) -> bool:
    """Whether a node is the call of a kept region: its first argument is a graph module."""
    return isinstance(_callee(node), GraphModule)


def body_of(node: Node) -> GraphModule:
    """The graph module that a region node calls."""
    body = _callee(node)
    assert isinstance(body, GraphModule)
    return body


def custom_function_of(node: Node) -> CustomFunction | None:
    """The custom autograd Function that a node calls, if it is the call of one."""
    callee = _callee(node)
    return callee if isinstance(callee, CustomFunction) else None


def modules_of(module: GraphModule) -> Iterator[GraphModule]:
    """The module and, recursively, the bodies of the regions and Functions in it."""
    yield module
    for node in module.graph.nodes:
        if is_region(node):
            yield from modules_of(body_of(node))
        elif (function := custom_function_of(node)) is not None:
            for graph in function.graphs():
                yield from modules_of(graph)


def placeholders(module: GraphModule) -> list[Node]:
    """The placeholder nodes in order."""
    return [n for n in module.graph.nodes if n.op == "placeholder"]
