"""Traces a function into a plain graph of ATen operations, cut between forward and backward.

Regions are traced as they run, so each region recomputes at the same place as in eager.
To the tracer, tensors that the function captures are constants; this module makes them inputs. The
graph of a forward and its pullback is cut where the pullback begins. The values that the second
part reads from the first are saved, so exactly the values that regions keep are saved. Views are
made again from their bases rather than saved.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from functx import _torch
from functx._compile.effects import refuse_kept
from functx._core import TracingError, line_now, module_of, tree
from functx._remat import operator_of, unseen
from functx._torch import compiler, graphs

aten = torch.ops.aten
_SAME = {aten.alias.default, aten.detach.default}  # identities, once all transforms are applied


@dataclass
class Traced:
    """A graph whose inputs are the arguments, then the constants.

    Placeholder nodes inside of it (``cotangents``) stand for the cotangents of results.
    """

    root: torch.nn.Module
    graph: fx.Graph
    constants: Sequence[Tensor] = ()
    cotangents: Sequence[fx.Node] = ()

    def module(self) -> fx.GraphModule:
        """A module that runs the graph; ``root`` has its generators and nested graphs."""
        self.graph.eliminate_dead_code(graphs.acts)
        return fx.GraphModule(self.root, self.graph)

    def draws(self) -> bool:
        """Whether the graph draws random numbers."""
        calls = [n for n in self.graph.nodes if isinstance(n.target, _torch.OpOverload)]
        known = [(operator_of(n.target), n.args) for n in calls]
        return any(op.draws and not op.draws_nothing(args) for op, args in known)

    def keep_draws(self) -> int:
        """Make the graph also return random numbers that no node reads; returns how many.

        A compiler would remove these draws, and the generator would not advance as in eager.
        """
        *nodes, output = self.graph.nodes
        written = [nodes[i] for i in self.written()]
        read = {*output.all_input_nodes}
        for node in reversed(nodes):
            if node in read or any(x in read or x in written for x in written_by(node)):
                read |= {node, *node.all_input_nodes}
        draws = [
            node
            for node in nodes
            if isinstance(node.target, _torch.OpOverload)
            and operator_of(node.target).draws
            and not operator_of(node.target).draws_nothing(node.args)
            and node not in read
            and isinstance(node.meta.get("val"), Tensor)
        ]
        output.args = ([*output.args[0], *draws],)
        return len(draws)

    def written(self, hidden: bool = True) -> list[int]:
        """The numbers of the inputs whose memory the graph writes.

        With ``hidden=False``, only writes that the schemas of operators declare count.
        """
        memory, written = dict[fx.Node, fx.Node](), set[fx.Node]()
        for node in self.graph.nodes:
            base = base_of(node)
            memory[node] = node if base is None else memory[base]
            if hidden or node.target not in _torch.HIDDEN_WRITES:
                written |= {memory[x] for x in written_by(node)}
        inputs = self.graph.find_nodes(op="placeholder")
        return [i for i, node in enumerate(inputs) if node in written]

    def cotangents_read(self, n: int) -> list[int]:
        """For each result a bit mask of those of the last ``n`` inputs that it depends on."""
        inputs = self.graph.find_nodes(op="placeholder")
        first = len(inputs) - n
        bits = {node: 1 << (i - first) if i >= first else 0 for i, node in enumerate(inputs)}
        for node in self.graph.nodes:
            if node not in bits:
                bits[node] = functools.reduce(operator.or_, map(bits.get, node.all_input_nodes), 0)
            for written in written_by(node):  # a tensor that is written depends on them too
                bits[written] |= bits[node]
        *_, output = self.graph.nodes
        return [bits.get(node, 0) for node in output.args[0]]

    def root_of(self, node: fx.Node) -> fx.Node:
        """The node that allocated the memory in which the result of ``node`` lies."""
        while (base := base_of(node)) is not None:
            node = base
        return node

    def examples(self) -> list[Any]:
        """The fake inputs with which the graph was traced."""
        return [n.meta["val"] for n in self.graph.nodes if n.op == "placeholder"]


def trace(f: Callable[..., Sequence[Tensor]], args: Sequence[Tensor], dynamic: bool) -> Traced:
    """The graph of ``f``; with ``dynamic``, sizes are symbols.

    ``f`` is called with a function before ``args``. That function returns a contiguous cotangent
    for a result.

    Raises:
        TracingError: the function reads the value of a tensor in Python.
    """
    cotangents = list[fx.Node]()

    def traced(*given: Tensor) -> list[Tensor]:
        return [*f(cotangent_of, *given)]

    def cotangent_of(t: Tensor) -> Tensor:
        cotangent = t.new_empty(t.shape)
        cotangents.append(graphs.last_node())
        return cotangent

    with (
        unseen(),
        without_saved_tensor_hooks(),
        _torch.without_dispatch_modes(),
        compiler.compiling(),
        torch.autograd.set_detect_anomaly(False),  # it reads values; it checks the call's results
    ):
        try:
            given = [t.detach() for t in args]
            module = graphs.make(traced, *given, dynamic=dynamic)
        except Exception as error:
            if not graphs.reads_values(error):
                raise
            raise TracingError(
                f"functx.jit: at {line_now(error)}{module_of(error)} the function reads the "
                f"value of a tensor in Python ({error}). A graph can't do that (J4). Compute with "
                "the tensor (torch.where, masks), or pass the value as an argument that is not a "
                "tensor."
            ) from error
    for node in cotangents:
        node.args = ([],)
    constants = _lift(module)
    refuse_kept(constants)
    _refuse_writes_to_arrays(module.graph, constants)
    _clean(module.graph)
    _take_sizes_from_inputs(module.graph)
    module.graph.eliminate_dead_code(lambda node: node in cotangents or graphs.acts(node))
    return Traced(module, module.graph, constants, cotangents)


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Without the saved-tensor hooks around a call: they get what the compiled call saves (J5)."""
    found = []
    while (hooks := _torch.top_saved_tensor_hooks(True)) is not None:
        found.append(hooks)
        _torch.pop_saved_tensor_hooks()
    try:
        yield
    finally:
        for hooks in reversed(found):
            _torch.push_saved_tensor_hooks(*hooks)


def _lift(module: fx.GraphModule) -> list[Tensor]:
    """Turn the constants of a graph into inputs; returns their values."""
    graph, constants, made = module.graph, list[Tensor](), dict[int, fx.Node]()
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(node.target)(module)
        if not isinstance(value, Tensor):
            continue
        if id(value) not in made:
            with graph.inserting_before(first):
                made[id(value)] = graph.placeholder(f"constant_{len(constants)}")
            made[id(value)].meta = dict(node.meta)
            constants.append(value)
        node.replace_all_uses_with(made[id(value)])
    return constants


def _refuse_writes_to_arrays(graph: fx.Graph, constants: Sequence[Tensor]) -> None:
    """Refuse writes to the memory of NumPy arrays.

    The tracer copies the result of `from_numpy`, so the graph would write to the copy only.
    """
    inputs = graph.find_nodes(op="placeholder")
    values = dict(zip(inputs[len(inputs) - len(constants) :], constants))
    copies = set[fx.Node]()
    for node in graph.nodes:
        if node.target is aten.lift_fresh_copy.default:
            t = values.get(node.args[0])
            if t is not None and not t.untyped_storage().resizable():
                copies.add(node)
        elif base_of(node) in copies:
            copies.add(node)
        if not copies.isdisjoint(written_by(node)):
            raise TracingError(
                "functx.jit: the function writes to the memory of an array, by torch.from_numpy or "
                "torch.as_tensor. A graph can't do that (J4). Make the tensor outside the "
                "function, and pass or capture it."
            )


def _clean(graph: fx.Graph) -> None:
    """Replace some operations by equivalent ones that compilers know."""
    for node in reversed(graph.nodes):
        if node.target in _SAME and not any(map(_changes_layout, node.users)):
            node.replace_all_uses_with(node.args[0])
        elif getattr(node.target, "namespace", "") == "profiler":  # only marks a range of time
            graph.erase_node(node)
        elif _is_of_training(node):
            # In training the backward does not read the running statistics. If they were saved for
            # it, the next forward would change them before the backward runs: a version error.
            node.args = (*node.args[:3], None, None, *node.args[5:])
        elif node.target is aten._new_zeros_with_same_feature_meta.default:
            value = node.meta["val"]
            if 0 in value.stride():  # strides of an expanded tensor, but it is written next
                node.target = aten.new_zeros.default
                node.args, node.kwargs = (node.args[0], [*value.shape]), {}


def _take_sizes_from_inputs(graph: fx.Graph) -> None:
    """Read each size from an input, or compute it from sizes of inputs.

    The tracer reads a size from the first tensor that had it. If that is the result of a product in
    a region, the graph would compute the product and keep its result only to read the size.
    """
    of_inputs = {
        n.node.expr: (node, i, n)
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), Tensor)
        for i, n in enumerate(node.meta["val"].shape)
        if isinstance(n, torch.SymInt)
    }
    first = next(n for n in graph.nodes if n.op != "placeholder")
    known = dict[Any, fx.Node]()  # by expression, the node that computes it from inputs only
    computed = set[fx.Node]()  # the same nodes
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt):
            continue
        expression = value.node.expr
        if expression not in known:
            if expression in of_inputs:
                read, i, size = of_inputs[expression]
                with graph.inserting_before(first):
                    known[expression] = graph.call_function(aten.sym_size.int, (read, i))
                known[expression].meta["val"] = size
            elif computed.issuperset(node.all_input_nodes):
                known[expression] = node
            else:
                continue
            computed.add(known[expression])
        if known[expression] is not node:
            node.replace_all_uses_with(known[expression])


def _is_of_training(node: fx.Node) -> bool:
    """Whether a node is the backward of a batch norm in training."""
    if node.target is aten.cudnn_batch_norm_backward.default:
        return True
    return node.target is aten.native_batch_norm_backward.default and node.args[7] is True


def _changes_layout(node: fx.Node) -> bool:
    """Whether a node changes the shape or strides of a tensor in place, but not of its aliases."""
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def cut(traced: Traced, n_results: int) -> tuple[Traced, list[int], int]:
    """Cut the backward off. The forward then also returns the values to save, sizes last.

    Returns:
        The backward graph, whose inputs are some inputs of the forward, the saved values and the
        cotangents; the numbers of those inputs of the forward; and the number of saved sizes.
    """
    *nodes, output = traced.graph.nodes
    results, gradients = output.args[0][:n_results], output.args[0][n_results:]
    start = nodes.index(traced.cotangents[0]) if traced.cotangents else len(nodes)
    later = nodes[start:]
    todo = [n for n in gradients if isinstance(n, fx.Node)]
    todo += [n for node in later for n in node.all_input_nodes]
    known, given = {*later}, dict[fx.Node, None]()
    for node in todo:  # the loop appends to this list
        if _is_view(node) and node not in known:
            todo += node.all_input_nodes
        elif node not in known:
            given[node] = None
    inputs = [n for n in nodes if n.op == "placeholder"]
    reads = [i for i, n in enumerate(inputs) if n in given]
    inner = [n for n in given if n.op != "placeholder"]
    sizes = [n for n in inner if not isinstance(n.meta["val"], Tensor)]
    saved = [*(n for n in inner if n not in sizes), *sizes]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*(inputs[i] for i in reads), *saved, *traced.cotangents):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in later:
        copied(node)
    graph.output(fx.map_arg([*gradients], copied))
    output.args = ([*results, *saved],)
    for node in reversed(later):
        traced.graph.erase_node(node)
    return Traced(traced.root, graph), reads, len(sizes)


def _is_view(node: fx.Node) -> bool:
    """Whether the result of a node is a view of its operand, and the node writes nothing."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or len(schema.returns) != 1:
        return False
    return schema.returns[0].alias_info is not None


def base_of(node: fx.Node) -> fx.Node | None:
    """The node in whose memory the result lies: it is a part, a view, or was written in place."""
    if node.target in (operator.getitem, torch.ops.aten._unsafe_view.default):
        return node.args[0]  # type: ignore[return-value]
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None for r in schema.returns):
        return None
    return next(iter(node.all_input_nodes), None)


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that a node writes to."""
    if isinstance(node.target, _torch.OpOverload):
        for i in operator_of(node.target).writes:
            name = node.target._schema.arguments[i].name
            x = node.args[i] if i < len(node.args) else node.kwargs.get(name)
            yield from (a for a in tree.leaves(x) if isinstance(a, fx.Node))
