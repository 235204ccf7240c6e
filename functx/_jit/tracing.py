"""Traces a function into a plain graph of ATen operations, cut between forward and backward.

Regions are traced as they run, so each recomputes in the graph where it does in eager. Tensors that
the function reads otherwise than through its arguments are constants to the tracer; here they
become inputs. The joint of a forward and its pullback is cut where the pullback begins: what the
second part reads of the first one is saved, so that it is what regions keep. Views are not saved
but made again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from functx import _torch
from functx._errors import TracingError
from functx._lines import line_now
from functx._remat import operator_of, unseen
from functx._torch import compiler, graphs

aten = torch.ops.aten
# Do nothing to a value below all transforms.
_SAME = {aten.alias.default, aten.detach.default}
# Ask for what the trace already knows.
_ASKS = {aten.is_same_size.default, aten._has_same_storage_numel.default}
_FORWARD, _COTANGENT = "functx_forward", "functx_cotangent"  # noted at nodes
INPUT, SAVED, COTANGENT, SIZE = "input", "saved", "cotangent", "size"  # given to a backward


class Traced:
    """A graph whose inputs are arguments, and then constants and cotangents."""

    def __init__(self, root: torch.nn.Module, graph: fx.Graph, constants: list[Tensor]) -> None:
        self.root, self.graph, self.constants = root, graph, constants

    def module(self) -> fx.GraphModule:
        """What runs it."""
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)  # (generators, graphs inside of it)

    def draws(self) -> bool:
        """Whether random numbers are drawn."""
        calls = [n for n in self.graph.nodes if isinstance(n.target, _torch.OpOverload)]
        known = [(operator_of(n.target), n.args) for n in calls]
        return any(op.draws and not op.draws_nothing(args) for op, args in known)

    def examples(self) -> list[Any]:
        """Fake inputs."""
        return [n.meta["val"] for n in self.graph.nodes if n.op == "placeholder"]


class Trace:
    """What a function that is traced says of its graph."""

    def __init__(self) -> None:
        self.last: Any = None  # node of the forward
        self.cotangents: list[fx.Node] = []

    def end_forward(self) -> None:
        """What follows is the backward."""
        self.last = graphs.last_node()

    def cotangent_of(self, t: Tensor) -> Tensor:
        """A further input, of the shape of ``t``, contiguous."""
        cotangent = t.new_empty(t.shape)
        self.cotangents.append(graphs.last_node())
        return cotangent


def trace(f: Callable[..., Sequence[Tensor]], args: Sequence[Tensor], dynamic: bool) -> Traced:
    """The graph of ``f``, which is given a `Trace` before ``args``; for other sizes, if dynamic.

    Raises:
        TracingError: the function reads values of tensors in Python.
    """
    said = Trace()
    with unseen(), _torch.without_dispatch_modes(), compiler.compiling():
        try:
            given = [t.detach() for t in args]
            module = graphs.make(lambda *ts: [*f(said, *ts)], *given, dynamic=dynamic)
        except Exception as error:
            if not graphs.reads_values(error):
                raise
            raise TracingError(
                f"functx.jit: at {graphs.line_of(error) or line_now()} the function reads the "
                f"value of a tensor in Python ({error}), which a graph can't. Compute with the "
                "tensor (torch.where, masks), or pass the value as an argument that is no tensor."
            ) from error
    if said.last is not None:
        for node in module.graph.nodes:
            node.meta[_FORWARD] = True
            if node is said.last:
                break
    for i, node in enumerate(said.cotangents):
        first = next(n for n in module.graph.nodes if n.op != "placeholder")
        with module.graph.inserting_before(first):
            new = module.graph.placeholder(f"cotangent_{i}")
        new.meta = {**node.meta, _COTANGENT: i}
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    constants = _lift(module)
    _clean(module.graph)
    return Traced(module, module.graph, constants)


def _lift(module: fx.GraphModule) -> list[Tensor]:
    """Make the constants of a graph inputs."""
    graph, constants = module.graph, list[Tensor]()
    made: dict[int, fx.Node] = {}
    inputs = [n for n in graph.nodes if n.op == "placeholder" and _COTANGENT not in n.meta]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        value = operator.attrgetter(node.target)(module)
        if not isinstance(value, Tensor):
            continue
        if id(value) not in made:
            with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
                new = graph.placeholder(f"constant_{len(constants)}")
            new.meta = dict(node.meta)
            inputs.append(new)
            made[id(value)] = new
            constants.append(value)
        node.replace_all_uses_with(made[id(value)])
        graph.erase_node(node)
    return constants


def _clean(graph: fx.Graph) -> None:
    """Take out what computes nothing, and what nobody reads."""
    for node in list(graph.nodes):
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _ASKS and not node.users:
            graph.erase_node(node)
        elif node.target is aten._efficientzerotensor.default:
            with graph.inserting_before(node):
                zeros = graph.call_function(aten.zeros.default, node.args, node.kwargs)
            zeros.meta = node.meta
            node.replace_all_uses_with(zeros)
            graph.erase_node(node)
        elif node.target is aten._new_zeros_with_same_feature_meta.default:
            value = node.meta["val"]
            if 0 in value.stride():  # written next, and like an expanded tensor
                node.target = aten.new_zeros.default
                node.args, node.kwargs = (node.args[0], [*value.shape]), {}
    graph.eliminate_dead_code(graphs.acts)


def cut(traced: Traced, n_results: int) -> tuple[Traced, Traced, list[tuple[str, int]]]:
    """The forward, which also returns what is saved, tensors and then sizes, and the backward.

    For each input of the backward, it is said what it is, by kind and number.
    """
    nodes = [*traced.graph.nodes]
    inputs = [n for n in nodes if n.op == "placeholder" and _COTANGENT not in n.meta]
    outputs = nodes.pop().args[0]
    results, gradients = outputs[:n_results], outputs[n_results:]
    second = [n for n in nodes if n.op != "placeholder" and not n.meta.get(_FORWARD)]
    later, given = set(second), dict[fx.Node, None]()
    todo = [n for n in gradients if isinstance(n, fx.Node)]
    todo = [n for node in second for n in node.all_input_nodes] + todo
    for node in todo:  # which grows
        if node in later:
            continue
        if _is_view(node):
            todo += node.all_input_nodes
        else:
            given[node] = None
    backward = fx.Graph()
    copies = {node: backward.placeholder(node.name) for node in given}
    for node in given:
        copies[node].meta = dict(node.meta)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = backward.node_copy(node, copied)
        return copies[node]

    for node in second:
        copied(node)
    backward.output([copied(n) if isinstance(n, fx.Node) else n for n in gradients])
    inner = [n for n in given if n.op != "placeholder"]
    saved, sizes = [
        [n for n in inner if isinstance(n.meta["val"], Tensor) is kind] for kind in (True, False)
    ]
    forward = fx.Graph()
    copies = {}
    for node in nodes:
        if node not in later and _COTANGENT not in node.meta:
            copies[node] = forward.node_copy(node, copies.__getitem__)
    forward.output([copies[n] if isinstance(n, fx.Node) else n for n in (*results, *saved, *sizes)])
    for graph in (forward, backward):
        graph.eliminate_dead_code(graphs.acts)
    what = [
        (COTANGENT, n.meta[_COTANGENT])
        if _COTANGENT in n.meta
        else (INPUT, inputs.index(n))
        if n.op == "placeholder"
        else (SAVED, saved.index(n))
        if n in saved
        else (SIZE, sizes.index(n))
        for n in given
    ]
    root = traced.root
    return Traced(root, forward, traced.constants), Traced(root, backward, []), what


def _is_view(node: fx.Node) -> bool:
    """Whether a node gives memory of its operand's, and writes nothing."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or len(schema.returns) != 1:
        return False
    return schema.returns[0].alias_info is not None
