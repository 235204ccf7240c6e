"""Trace custom ``autograd.Function`` s, with their derivative rules.

A trace below autograd sees only the operations of a Function's forward. So ``apply`` is intercepted
while a function is traced (`functx._torch.process_patches`). The Function runs as usual. Then it
runs once more on stand-ins, forward and backward together. torch's own code runs both, so that
``needs_input_grad``, ``materialize_grads``, ``mark_non_differentiable`` and so on work as in torch.
The resulting joint graph is cut where the forward ended. A value that crosses the cut is one of
these:

- an operand: the rule reads the operand of the node;
- a result: the rule reads the result of the node, so that a derivative of the rule uses the
  Function's own rule again;
- otherwise, an *intermediate*. As in torch, no derivative flows through it.

The same is done for ``jvp``, if the Function has one.

NOTE [raw operations]
The operations of the forward stay in the graph in addition to the node, because a tape inside the
traced function (``functx.grad``) reads what they saved. If an operation after the Function reads
one of their results, ``isolate`` replaces it by the node's operand or result, or stops the
gradient. Operations without users are then removed as dead code.

What could be improved: the rules are traced at every call of a Function, also if a graph calls it
many times with equal shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointFunction

import functx
from functx import _torch as engine
from functx._core import LoweringError, has_derivatives
from functx._remat import unseen
from functx._torch.lowering import (
    BackwardHookFunction,
    FakeTensorMode,
    is_once_differentiable,
    unhooked,
)
from functx._torch.process_patches import plain_apply
from functx.compat._to_jax.nodes import (
    CustomFunction,
    DerivativeRule,
    emit,
    modules_of,
    nodes_from_now,
    placeholders,
)
from functx.compat._to_jax.passes.functional import (
    functional,
    lift_constants,
    writes_to_placeholders,
)
from functx.compat._to_jax.trace.traced_draws import TracedDraws

aten = torch.ops.aten
_SAME = (aten.alias.default, aten.detach.default)
FORWARD, RAW = "functx_forward", "functx_raw"
_FAILURES = (LoweringError, RuntimeError, TypeError, ValueError, AssertionError)


class Within(threading.local):
    """Whether this thread is running the forward of a custom Function."""

    forward = False  # it is, and the Function has a node
    plain = False  # it is, without a node: in a ``no_grad`` block, or while rules are traced


within = Within()


@contextmanager
def _set(**flags: bool) -> Iterator[None]:
    before = {name: getattr(within, name) for name in flags}
    for name, value in flags.items():
        setattr(within, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(within, name, value)


@dataclass(frozen=True)
class Interceptor:
    """Runs the forwards of custom Functions in a trace, and adds their nodes to the graph."""

    draws: TracedDraws
    mode: FakeTensorMode

    def __call__(self, cls: type, forward: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the forward of ``cls``; its results are those of a node of the graph."""
        if not issubclass(cls, torch.autograd.Function):  # functorch's wrapper of a Function
            return forward(*args)
        if cls is CheckpointFunction:
            run, preserve, *rest = args
            return functx.remat(run, preserve_rng_state=preserve)(*rest)
        if cls is BackwardHookFunction:
            raise LoweringError(
                "a module that the function calls has backward hooks, which JAX's derivatives would"
                " ignore silently. Remove them (handle.remove()), or change gradients in an"
                " autograd.Function instead"
            )
        if within.forward or not torch.is_grad_enabled():
            with _set(plain=not within.forward):
                return forward(*args)
        mode = engine.proxy_mode()
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if mode is None or not any(has_derivatives(t) for t in tensors):
            with _set(forward=True):
                return forward(*args)
        with unseen():
            shapes = [_like(t) for t in tensors]
        new_nodes = nodes_from_now(mode.tracer.graph)
        start = self.draws.states()
        with _set(forward=True):
            out = forward(*args)
        results = _tensors(out)
        raw = new_nodes()
        # The rules are traced with default settings, not with those that surround the call.
        rewound = self.draws.rewound(start)
        with unseen(), rewound, torch.enable_grad(), _set(plain=True), unhooked():
            function, captures = _Tracer(cls, args, shapes, results, self.mode).function()
            raw_results = [_node_of(r) for r in results]
            emit(function, [*tensors, *captures], results)
        node = _node_of(results[0]).args[0]
        assert isinstance(node, Node)
        node.meta[RAW] = (raw, raw_results)
        return out


def _tensors(out: Any) -> list[torch.Tensor]:
    """The tensors among the results of a Function."""
    return [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor)]


def _like(t: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes new tensors with the shape, strides, dtype and device of ``t``."""
    shape, stride, dtype, device = tuple(t.shape), t.stride(), t.dtype, t.device
    return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _node_of(t: torch.Tensor) -> Node:
    return engine.proxy_mode().tracer.unwrap_proxy(t).node


@dataclass
class _Tracer:
    """Traces the rules for one call of a Function."""

    cls: Any
    args: Sequence[Any]
    operands: Sequence[Callable[[], torch.Tensor]]  # each makes a stand-in for an operand
    results: Sequence[torch.Tensor]
    mode: FakeTensorMode

    def __post_init__(self) -> None:
        self._outer = engine.proxy_mode().tracer
        self._to: list[int] = []  # the operands that get gradients from the backward

    def function(self) -> tuple[CustomFunction, list[torch.Tensor]]:
        """The Function with its rules, and the tensors that it closes over."""
        n_cotangents = [i for i, r in enumerate(self.results) if has_derivatives(r)]
        cotangents = [_like(self.results[i]) for i in n_cotangents]
        failed = ""
        try:
            back = self._trace(lambda *t: self._joint(n_cotangents, *t), cotangents)
            to = list(self._to)
        except _FAILURES as err:
            failed = f"{type(err).__name__}: {err}"
            back = self._trace(self._forward_only, [])
            to = []
        traces = [back]
        of = self._differentiable_operands()
        if self.cls.jvp is not torch.autograd.Function.jvp:
            # If the jvp fails, the transpose of the backward is used. (vmap generates a jvp that
            # fails for Functions that have none.)
            with suppress(*_FAILURES):
                traces.append(self._trace(self._joint_jvp, [self.operands[i] for i in of]))
        captures = list({id(t): t for _, lifted, _ in traces for t in lifted}.values())
        rules = [
            cut(graph, lifted, extra, captures, len(self.operands), len(self.results))
            for graph, lifted, extra in traces
        ]
        graph, residuals, forward = rules[0]
        backward: DerivativeRule | str | None = failed or None
        if not failed and to:
            backward = DerivativeRule(graph, residuals, tuple(n_cotangents), tuple(to), forward)
        jvp = None
        if len(rules) > 1:
            graph, residuals, with_mids = rules[1]
            jvp = DerivativeRule(graph, residuals, tuple(of), tuple(n_cotangents), with_mids)
        once = is_once_differentiable(self.cls)
        n = len(self.results)
        return CustomFunction(self.cls.__name__, forward, n, backward, jvp, once), captures

    def _differentiable_operands(self) -> list[int]:
        tensors = [a for a in self.args if isinstance(a, torch.Tensor)]
        return [i for i, t in enumerate(tensors) if has_derivatives(t)]

    def _trace(
        self, f: Callable[..., Any], extra: Sequence[Callable[[], torch.Tensor]]
    ) -> tuple[GraphModule, list[torch.Tensor], int]:
        """A functional graph of ``f``, the tensors it closes over, and the number of ``extra``."""
        with engine.without_proxies():
            inputs = [make() for make in (*self.operands, *extra)]
        module = engine.trace_subgraph(f, *inputs)
        isolate(module)
        with engine.without_proxies():
            lifted = lift_constants(module, self.mode, self._known)
        with _set(forward=True):  # no node for the operations that run again here
            module = functional(module, lambda run, xs: engine.trace_subgraph(run, *xs), self.mode)
        if writes_to_placeholders(module):
            raise LoweringError(
                f"{self.cls.__name__}, a custom autograd.Function, writes to its inputs"
                " (mark_dirty), but JAX arrays can't be written to. Return a new tensor instead"
            )
        return module, lifted, len(extra)

    def _known(self, t: torch.Tensor) -> bool:
        return not isinstance(self._outer.unwrap_proxy(t), torch.Tensor)

    def _full(self, tensors: Sequence[Any]) -> list[Any]:
        feed = iter(tensors)
        return [next(feed) if isinstance(a, torch.Tensor) else a for a in self.args]

    def _apply(self, apply: Callable[..., Any], tensors: Sequence[Any]) -> list[torch.Tensor]:
        with _set(forward=True):
            out = apply(*self._full(tensors))
        return _tensors(out)

    def _forward_only(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        results = self._apply(plain_apply(self.cls), operands)
        _mark_forward()
        return results

    def _joint(self, of: Sequence[int], *tensors: torch.Tensor) -> list[Any]:
        """The results, followed by a gradient for each operand that can have one."""
        operands, cotangents = tensors[: len(self.operands)], tensors[len(self.operands) :]
        at = self._differentiable_operands()
        for i in at:
            operands[i].requires_grad_()
        results = self._apply(plain_apply(self.cls), operands)
        _mark_forward()
        pairs = [(results[i], c) for i, c in zip(of, cotangents) if results[i].requires_grad]
        self._to = at if pairs else []
        if not pairs:
            return results
        gradients = torch.autograd.grad(
            [r for r, _ in pairs],
            [operands[i] for i in at],
            [c for _, c in pairs],
            create_graph=True,
            allow_unused=True,
        )
        return [*results, *gradients]

    def _joint_jvp(self, *tensors: torch.Tensor) -> list[Any]:
        """The results, followed by a tangent for each result that can have one."""
        operands, tangents = list(tensors[: len(self.operands)]), tensors[len(self.operands) :]
        own = self.cls.jvp

        def jvp(*args: Any) -> Any:
            _mark_forward()
            with _set(forward=False):
                return own(*args)

        marked = type(self.cls.__name__, (self.cls,), {"jvp": staticmethod(jvp)})
        with forward_ad.dual_level():
            for i, t in zip(self._differentiable_operands(), tangents):
                operands[i] = forward_ad.make_dual(operands[i], t)
            results = self._apply(plain_apply(marked), operands)
            duals = [forward_ad.unpack_dual(r) for r in results if has_derivatives(r)]
        return [*results, *(d.tangent for d in duals)]


def _mark_forward() -> None:
    for node in engine.proxy_mode().tracer.graph.nodes:
        node.meta["custom"] = {FORWARD: True}


def _forward_nodes(nodes: Sequence[Node], extra: Sequence[Node]) -> set[Node]:
    """The nodes that belong to the forward.

    They existed when the rule began (`_mark_forward`), and depend on no cotangent or tangent.
    """
    later: set[Node] = set(extra)
    found: set[Node] = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        marked = node.meta.get("custom", {}).get(FORWARD)
        (found if marked and later.isdisjoint(node.all_input_nodes) else later).add(node)
    return found


def _source(node: Node) -> Node:
    """The node that ``node`` is an alias of, or ``node`` itself."""
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
    """Cut a joint graph into a forward and a rule.

    Args:
        joint: the graph.
        lifted: the tensors that the graph closes over, whose placeholders come last.
        n_extra: the number of cotangents or tangents.
        captures: the tensors that any graph of the Function closes over.
        n_operands: the number of operands.
        n_results: the number of results.

    Returns:
        The graph of the rule, its residuals, and the graph of the forward, which also returns the
        intermediates that the rule reads.
    """
    nodes = list(joint.graph.nodes)
    outputs = nodes[-1].args[0]
    inputs = placeholders(joint)
    late = {id(t): p for t, p in zip(lifted, inputs[n_operands + n_extra :])}
    operands = [*inputs[:n_operands], *(late.get(id(t)) for t in captures)]
    extra = inputs[n_operands : n_operands + n_extra]
    results = outputs[:n_results]
    origins: dict[Node, tuple[str, int]] = {p: ("operand", i) for i, p in enumerate(operands) if p}
    for i, r in enumerate(results):
        origins.setdefault(_source(r), ("result", i))
    middle: list[Node] = []
    reads: dict[tuple[str, int], None] = {}

    def residual(node: Node) -> tuple[str, int]:
        source = _source(node)
        if source not in origins:
            origins[source] = ("intermediate", len(middle))
            middle.append(source)
        reads.setdefault(origins[source])
        return origins[source]

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
    copied: dict[Node, Node] = {}
    for i, operand in enumerate(operands):
        if operand is None:
            graph.placeholder(f"operand_{i}")
        else:
            copied[operand] = graph.node_copy(operand)
    for n in nodes:
        if n.op == "get_attr" or n in forward:
            copied[n] = graph.node_copy(n, copied.__getitem__)
    graph.output([copied[n] for n in (*results, *middle)])
    graph.eliminate_dead_code()
    return rule, tuple(reads), GraphModule(joint, graph)


def _live(nodes: Sequence[Node], outputs: Sequence[Any]) -> set[Node]:
    """The nodes among ``nodes`` from which ``outputs`` are computed."""
    among, live = set(nodes), set()
    stack = [o for o in outputs if o in among]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += [m for m in node.all_input_nodes if m in among]
    return live


def isolate(module: GraphModule) -> None:
    """Separate Functions from their raw operations; NOTE [raw operations]."""
    for inner in modules_of(module):
        for node in list(inner.graph.nodes):
            if RAW in node.meta:
                _isolate(node, *node.meta.pop(RAW))


def _isolate(node: Node, raw: Sequence[Node], results: Sequence[Node]) -> None:
    inside = set(raw)
    # If several results are the same tensor, use the first one.
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
