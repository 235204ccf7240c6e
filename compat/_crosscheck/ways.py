"""Run the same computation in four ways: in eager, as a trace, compiled, and in JAX.

The other three are compared with eager. The trace is the graph that `functx.jit` makes, run one
operation at a time. `functx.jit` passes the same graph to a compiler.

A matrix product is *run again* if it computes what an earlier product has computed. In eager these
are the products of replays; in a graph, those with the operation and the operands of an earlier
one; in JAX, those of ``jax.checkpoint``. A compiled function runs again the products that exceed
the number of different products in the graph. This shows whether a compiler has merged a
recomputation with the forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

import functx
from functx._core import operation_name, tree
from functx._torch.lowering import OpOverload
from functx.compat._crosscheck.precision import Difference
from functx.compat._crosscheck.products import PRODUCTS, products_of

EAGER, TRACED, COMPILED, JAX = "eager", "traced", "functx.jit", "JAX"


@dataclass(frozen=True)
class Way:
    """The results and the costs of one way to compute a quantity.

    Attributes:
        difference: the difference from eager; ``None`` for eager itself.
        products: how many matrix products and convolutions ran.
        again: how many of them repeat an earlier one.
        bytes: the peak; for JAX, the temporary bytes of the compiled program.
    """

    difference: Difference | None
    products: int
    again: int
    bytes: int | None


@dataclass(frozen=True)
class Traced:
    """The results, products and peak of a function that ran as a trace or compiled."""

    results: list[Tensor]
    products: int
    again: int
    peak: int | None


def traced(run: Callable[..., Any], args: Sequence[Any], peak: bool) -> tuple[Traced, list[Any]]:
    """Run the trace of a function. Returns its figures, and the graphs."""
    graphs: list[Any] = []

    def uncompiled(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    function = functx.jit(run, backend=uncompiled)
    results = tree.leaves(function(*args))
    total = again = 0
    for graph in graphs:
        found = _in_graph(graph)
        total += sum(found)
        again += sum(found) - sum(dict(zip(_numbers(graph), found)).values())
    return Traced(results, total, again, _peak(function, args, peak)), graphs


def compiled(
    run: Callable[..., Any], args: Sequence[Any], peak: bool, backend: Any, graphs: Sequence[Any]
) -> Traced:
    """Run a function compiled by `functx.jit`. ``graphs`` are the graphs that it compiles."""
    function = functx.jit(run, backend=backend)
    results = tree.leaves(function(*args))
    # The default profiler, Kineto, prints to stderr.
    with profile(use_kineto=False) as events:
        function(*args)
    calls = Counter(
        event.name.removeprefix("aten::")
        for event in events.function_events
        if _is_product(event) and not _within_product(event)
    )
    # The number of products in one call of an operation is known only from the graph.
    held: dict[str, list[int]] = {}
    different = 0
    for graph in graphs:
        found = _in_graph(graph)
        different += sum(dict(zip(_numbers(graph), found)).values())
        for node, number in zip(_nodes(graph), found):
            held.setdefault(_name(node), []).append(number)
    each = {name: max(1, round(sum(ns) / len(ns))) for name, ns in held.items()}
    total = sum(number * each.get(name, 1) for name, number in calls.items())
    return Traced(results, total, max(0, total - different), _peak(function, args, peak))


def _peak(function: Callable[..., Any], args: Sequence[Any], peak: bool) -> int | None:
    return functx.memory.peak(function, *args) if peak else None


def _is_product(event: Any) -> bool:
    name = event.name.removeprefix("aten::")
    return event.name.startswith("aten::") and (
        name in PRODUCTS or name == "convolution_backward" or name.startswith("_scaled_dot_product")
    )


def _within_product(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if _is_product(parent):
            return True
        parent = parent.cpu_parent
    return False


def _name(node: Any) -> str:
    return operation_name(node.target) if isinstance(node.target, OpOverload) else ""


def _nodes(graph: Any) -> list[Any]:
    """The nodes that compute products."""
    calls = (n for n in graph.graph.nodes if isinstance(n.target, OpOverload))
    return [n for n in calls if products_of(_name(n), n.args)]


def _in_graph(graph: Any) -> list[int]:
    return [products_of(_name(n), n.args) for n in _nodes(graph)]


def _numbers(graph: Any) -> list[Hashable]:
    """A number for the value of each product; equal for products that compute the same."""
    numbers: dict[Any, int] = {}
    seen: dict[Hashable, int] = {}

    def number(node: Any) -> int:
        return numbers[node]

    for node in graph.graph.nodes:
        if node.op != "call_function":
            numbers[node] = len(numbers) + len(seen)
            seen[node.name, "input"] = numbers[node]
            continue
        if _name(node) in ("detach", "alias") and node.args:
            numbers[node] = numbers[node.args[0]]
            continue
        args = torch.fx.map_arg((node.args, node.kwargs), lambda n: ("value", number(n)))
        numbers[node] = seen.setdefault((node.target, repr(args)), len(numbers) + len(seen))
    return [numbers[n] for n in _nodes(graph)]
