"""Remove constants and writes from a traced graph.

Invariant: after ``lift_constants`` the graph contains no tensors, and after ``functional`` no node
writes. Both keep the marks of nodes (the region's name and policy, the number of a draw).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import functionalize
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.traceback import preserve_node_meta

from functx._core import LoweringError
from functx._remat import keep_regions
from functx._torch.lowering import FakeTensor, FakeTensorMode, is_mutable
from functx.compat._to_jax.nodes import (
    attribute,
    body_of,
    draws,
    is_region,
    modules_of,
    placeholders,
)
from functx.compat._to_jax.source_lines import at_source, warn

aten = torch.ops.aten
_MOST_PASSES = 4
Again = Callable[[Callable[..., object], list[torch.Tensor]], GraphModule]
"""Traces a function for some tensors."""


def lift_constants(
    module: GraphModule, mode: FakeTensorMode, known: Callable[[torch.Tensor], bool] | None = None
) -> list[torch.Tensor]:
    """Replace every tensor attribute by a placeholder, inside regions first.

    Args:
        module: the graph.
        mode: the fake mode of the trace.
        known: says whether a traced tensor is a value of the surrounding graph. For any other
            traced tensor, the tracer has lost track of the value, and a ``LoweringError`` is
            raised.

    Returns:
        The tensors, in the order of their placeholders.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if not is_region(node):
            continue
        for i, tensor in enumerate(lift_constants(body_of(node), mode, known)):
            name = f"_lifted_{node.name}_{i}"
            module.register_buffer(name, tensor)
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            node.args = (*node.args, constant)
    lifted: dict[int, tuple[torch.Tensor, Node]] = {}
    last = ([None, *placeholders(module)])[-1]
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(attribute(node), torch.Tensor):
            continue
        tensor = attribute(node)
        fake = isinstance(tensor, FakeTensor)
        if fake and not (known is not None and known(tensor)):
            used = ", ".join(f"{u.target}{at_source(u)}" for u in node.users)
            raise LoweringError(
                f"the tracer lost track of a value that depends on the inputs ({used} uses it)."
                " Either code that the tracer can't see computed it (use operations of torch, or"
                " from_jax(g)), or a region or a layer of scan= passes it on without returning it"
                " (as hooks do that record outputs; turn off output_attentions and"
                " output_router_logits)"
            )
        if id(tensor) not in lifted:
            with graph.inserting_after(last) if last else graph.inserting_before(None):
                last = graph.placeholder(f"capture_{len(lifted)}")
            last.meta["val"] = tensor.detach() if fake else mode.from_tensor(tensor.detach())
            lifted[id(tensor)] = (tensor, last)
        node.replace_all_uses_with(lifted[id(tensor)][1])
        graph.erase_node(node)
    module.recompile()
    return [tensor for tensor, _ in lifted.values()]


def own_memory(module: GraphModule) -> None:
    """Copy tensors that are detached and then written to, so that derivatives follow the writes.

    The tensor that was detached gets the new values too, and keeps its derivative. If both are
    written to, each would have to follow the other, which is a ``LoweringError``.
    """
    for inner in modules_of(module):
        sources: dict[Node, Node] = {}  # for each copy, the tensor that was detached
        writes = [n for n in inner.graph.nodes if is_mutable(n.target)]
        for write in [*writes]:
            while write is not None:
                write = _write_apart(write, sources, writes)


def _aliases(node: Any) -> list[Node]:
    """A node and the nodes that it is a view of, back to the one that allocated the memory."""
    found = []
    while isinstance(node, Node):
        found.append(node)
        if not (getattr(node.target, "is_view", False) or is_mutable(node.target)):
            break
        node = node.args[0]
    return found


def _write_apart(write: Node, sources: dict[Node, Node], writes: list[Node]) -> Node | None:
    """Redirect a write to a copy of the detached tensor.

    Returns the node that writes the new values to the original tensor, if there is one. It may need
    to be redirected in turn.
    """
    aliases, graph = _aliases(write.args[0]), write.graph
    detached = next((n for n in aliases if n.target is aten.detach.default), None)
    if detached is not None:
        with graph.inserting_after(detached):
            copy = graph.call_function(aten.clone.default, (detached,))
        detached.replace_all_uses_with(copy, lambda user: user is not copy)
        sources[copy] = source = detached.args[0]  # type: ignore[assignment]
        origin = _aliases(source)[-1:]
        later = [w for w in writes if w > detached and _aliases(w.args[0])[-1:] == origin]
        if later:
            raise LoweringError(
                f"a tensor and its detach() are both written to{at_source(later[0])}; use"
                " detach().clone()"
            )
        aliases = [copy]
    if not aliases or (source := sources.get(aliases[-1])) is None:
        return None
    written = aliases[-1]
    with graph.inserting_after(write):
        before = graph.call_function(aten.clone.default, (source,))
    with graph.inserting_after(before):
        after = graph.call_function(torch.ops.functx.straight_through.default, (written, before))
    with graph.inserting_after(after):
        return graph.call_function(aten.copy_.default, (source, after))


def functional(module: GraphModule, again: Again, mode: FakeTensorMode) -> GraphModule:
    """Functionalize a graph and trace it ``again``, until no node writes.

    Writes to placeholders remain, as ``copy_`` nodes. Raises a ``LoweringError`` for an operation
    without a functional form.
    """
    for _ in range(_MOST_PASSES):
        if not any(is_mutable(n.target) for m in modules_of(module) for n in m.graph.nodes):
            break
        specs = [p.meta["val"] for p in placeholders(module)]
        with mode:
            inputs = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in specs]
        run = functionalize(Interpreter(module).run, remove="mutations")
        try:
            with mode, keep_regions(), torch.no_grad(), preserve_node_meta():
                later = again(run, inputs)
        except RuntimeError as err:
            raise LoweringError(f"an in-place operation has no functional form: {err}") from err
        _keep_marks(module, later)
        module = later
    return module


def _keep_marks(before: GraphModule, after: GraphModule) -> None:
    """Copy the marks of regions and draws to a graph that was traced again."""
    for what, kind, mark in (
        ("remat regions", is_region, "functx_region"),
        ("random operations", lambda n: draws(n.target, n.args), "functx_draw"),
    ):
        old, new = ([n for n in m.graph.nodes if kind(n)] for m in (before, after))
        if len(old) != len(new):
            raise LoweringError(
                f"{len(old)} {what} became {len(new)} when the graph was traced again; please"
                " report this"
            )
        for a, b in zip(old, new):
            b.meta[mark] = a.meta.get(mark)
            if kind is is_region:
                _keep_marks(body_of(a), body_of(b))


def drop_writes_to_inputs(module: GraphModule, n_inputs: int) -> None:
    """Drop writes to inputs, with a warning, and raise an error for writes to captured tensors.

    The first ``n_inputs`` placeholders are inputs, the others are captured tensors.
    """
    written = writes_to_placeholders(module)
    inputs = placeholders(module)[:n_inputs]
    closed_over = sum(node.args[0] not in inputs for node in written)
    if closed_over:
        raise LoweringError(
            f"the function writes to {closed_over} tensors that it closes over (buffers,"
            " parameters), but JAX can't store the new values. Pass them as arguments and return"
            " the new values. For a module, use to_jax(module, buffers=True), or module.eval() if"
            " it writes only in training"
        )
    if written:
        warn(
            f"the function writes to {len(written)} of its arguments, but JAX arrays never change,"
            " so the caller will not see this. Return the new values if they are needed"
        )
    for node in reversed(written):
        node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
        module.graph.erase_node(node)


def writes_to_placeholders(module: GraphModule) -> list[Node]:
    """The nodes by which a functional graph writes to its inputs."""
    written = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return [node for node in written if getattr(node.args[0], "op", "") == "placeholder"]
