"""The kinds of nodes in a traced graph: operations, regions, and custom Functions.

The node of a custom ``autograd.Function`` contains the Function's own derivative rules as graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, Proxy

from functx import _torch as engine
from functx._remat import operator_of, unseen
from functx._torch.lowering import HigherOrderOperator, OpOverload


@dataclass(frozen=True)
class DerivativeRule:
    """A derivative rule of a custom Function.

    Attributes:
        graph: takes the residuals, then a cotangent of each result in ``of`` (for a jvp, a tangent
            of each operand in ``of``). It returns a cotangent of each operand in ``to`` (for a jvp,
            a tangent of each result in ``to``), ``None`` for zero.
        residuals: the values that the rule reads: ``("operand", i)``, ``("result", i)`` or
            ``("intermediate", i)``.
        of: numbers of the results (for a jvp, operands) whose derivatives the rule takes.
        to: numbers of the operands (for a jvp, results) whose derivatives the rule returns.
        forward: a graph that maps operands to results, followed by intermediates.
    """

    graph: GraphModule
    residuals: tuple[tuple[str, int], ...]
    of: tuple[int, ...]
    to: tuple[int, ...]
    forward: GraphModule


class CustomFunction(torch.nn.Module):
    """The first argument of a custom Function's node; the others are its operands.

    Attributes:
        name: the name of the Function.
        forward_graph: a graph that maps operands to results, followed by the intermediates that the
            backward reads.
        n_results: the number of results.
        backward: its rule; ``None`` if no operand has a derivative; the text of torch's error if
            the backward failed.
        jvp: its rule, if the Function has a jvp.
        once: whether a second derivative is an error.
    """

    def __init__(
        self,
        name: str,
        forward_graph: GraphModule,
        n_results: int,
        backward: DerivativeRule | str | None,
        jvp: DerivativeRule | None,
        once: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.forward_graph = forward_graph
        self.n_results = n_results
        self.backward = backward
        self.jvp = jvp
        self.once = once

    @property
    def unruled(self) -> tuple[int, ...]:
        """The floating-point operands if the backward failed and there is no jvp, else none."""
        if not isinstance(self.backward, str):
            return ()
        inputs = [n for n in self.forward_graph.graph.nodes if n.op == "placeholder"]
        return tuple(i for i, n in enumerate(inputs) if n.meta["val"].dtype.is_floating_point)

    def results(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results of the forward."""
        return tuple(self.forward_graph(*operands)[: self.n_results])

    def graphs(self) -> list[GraphModule]:
        """All graphs of the Function."""
        rules = [r for r in (self.backward, self.jvp) if isinstance(r, DerivativeRule)]
        found = [self.forward_graph, *(g for r in rules for g in (r.graph, r.forward))]
        return list({id(g): g for g in found}.values())

    def described(self) -> list[Any]:
        """Everything but the graphs, for comparisons."""
        rules = [
            (r.residuals, r.of, r.to) if isinstance(r, DerivativeRule) else r
            for r in (self.backward, self.jvp)
        ]
        return [self.name, self.n_results, self.once, len(self.graphs()), *rules]


def custom_function(function: CustomFunction, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The target of a custom Function's node, which stays one node if the graph is traced again."""
    if engine.peek_interpreter() is not None:
        return _functionalized(function, operands)
    mode = engine.proxy_mode()
    if mode is None:
        return function.results(*operands)
    with engine.without_proxies():
        results = function.results(*operands)
    return emit(function, operands, results)


def _functionalized(
    function: CustomFunction, operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    interpreter: Any = engine.current_interpreter()
    assert interpreter.key() == engine.TransformType.Functionalize
    views = interpreter.functionalize_add_back_views()

    def inside(t: torch.Tensor) -> torch.Tensor:
        if not engine.is_functional(t):
            return t
        engine.sync(t)
        return engine.unwrap_functional(t, views)

    bare = [inside(t) for t in operands]
    with interpreter.lower():
        results = custom_function(function, *bare)
    return tuple(engine.wrap_functional(r, interpreter.level()) for r in results)


def emit(
    function: CustomFunction, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> Any:
    """Add the node to the graph that is being traced, with ``results`` as its results."""
    tracer = engine.proxy_mode().tracer
    tracer.root.register_module(tracer.get_fresh_qualname("function_"), function)
    proxies = [tracer.unwrap_proxy(t) for t in operands]
    proxy: Proxy = tracer.create_proxy("call_function", custom_function, (function, *proxies), {})
    with unseen():  # an enclosing region must not record the calls of the tracer
        return engine.track_proxies(tuple(results), proxy, tracer)


def attribute(node: Node) -> Any:
    """The attribute that a ``get_attr`` node reads."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _callee(node: Node) -> Any:
    first = node.args[0] if node.op == "call_function" and node.args else None
    return attribute(first) if isinstance(first, Node) and first.op == "get_attr" else None


def is_region(node: Node) -> bool:
    """Whether a node is the call of a kept region: its first argument is a graph module."""
    higher_order = isinstance(node.target, HigherOrderOperator)  # such as torch's own scan
    return isinstance(_callee(node), GraphModule) and not higher_order


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


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The results of a node that are tensors, as fake tensors of the trace."""
    value: Any = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def nodes_from_now(graph: Graph) -> Callable[[], list[Node]]:
    """A function that returns the nodes that were added to a graph since this call."""
    last = next(iter(reversed(graph.nodes)), None)
    return lambda: [*takewhile(lambda node: node is not last, reversed(graph.nodes))][::-1]


def draws(target: Any, args: Any) -> bool:
    """Whether a call draws random numbers, by the same rules as the recompute engine."""
    operator = operator_of(target) if isinstance(target, OpOverload) else None
    return operator is not None and operator.draws and not operator.draws_nothing(args)
