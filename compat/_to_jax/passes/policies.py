"""Let a region with a policy save in JAX the values that the policy saves in torch.

The policy decides about the ATen operations in the region's graph, on one example, as in torch.
Each value that it saves gets a unique name, and ``jax.checkpoint`` saves these names. So the choice
does not depend on JAX's primitives, or on a ``jax.vmap`` around the region.

A trace below ``functx.vmap`` contains batched operations, but a policy decides about operations on
one example. So each function that the body of such a region calls is traced once more, with the
shapes of one example. The operations of that trace are noted at the nodes of the real one, matched
by order, kind and size. A wrong match can only change what is saved, never a value. NOTE [one
example] in `functx._remat.examples` describes the same for torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.ad_checkpoint import checkpoint_name
from torch.fx import GraphModule, Node, map_arg

from functx import _torch as engine
from functx._policies import Decision, Everything, Policy, Value
from functx._remat import batch_being_traced, is_batched_form
from functx._torch.lowering import OpOverload, make_fx, map_tensors
from functx.compat._to_jax.nodes import nodes_from_now, tensors_of
from functx.compat._to_jax.rules.table import decompositions

EXAMPLE = "functx_example"
"""The key in ``node.meta["custom"]`` for the operation on one example."""


def with_examples(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function in the body of a region; mark its nodes with operations on one example."""
    batch = batch_being_traced()
    mode = engine.proxy_mode() if batch > 1 else None
    if mode is None:
        return func(*args, **kwargs)
    new_nodes = nodes_from_now(mode.tracer.graph)
    out = func(*args, **kwargs)
    if new_nodes():
        _mark(new_nodes(), _one_example(func, args, kwargs), batch)
    return out


def _one_example(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Node]:
    arguments = args, kwargs
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, arguments)

    def run(*inputs: torch.Tensor) -> Any:
        feed = iter(inputs)
        args, kwargs = map_tensors(lambda _: next(feed), arguments)
        return func(*args, **kwargs)

    try:
        with (
            engine.without_proxies(),
            engine.cleared_interpreter_stack(),
            engine.without_function_modes(),
            engine.without_dispatch_modes(),
            torch.no_grad(),
        ):
            metas = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
            graph = make_fx(run, decomposition_table=decompositions())(*metas).graph
    except Exception:  # its shapes depend on values; then no operation is known
        return []
    return [n for n in graph.nodes if n.op == "call_function"]


def _mark(nodes: Sequence[Node], examples: Sequence[Node], batch: int) -> None:
    at = 0
    for example in examples:
        for i in range(at, len(nodes)):
            if _same(example, nodes[i], batch):
                nodes[i].meta.setdefault("custom", {})[EXAMPLE] = (
                    example.target,
                    map_arg(example.args, _value),
                    map_arg(example.kwargs, _value),
                    example.meta["val"],
                )
                at = i + 1
                break


def _value(node: Node) -> Any:
    return node.meta.get("val", node)


def _same(example: Node, node: Node, batch: int) -> bool:
    one, batched = example.target, node.target
    if not isinstance(one, OpOverload) or not isinstance(batched, OpOverload):
        return False
    if not (tensors_of(example) and tensors_of(node)):
        return False
    if not is_batched_form(one, batched, example.meta["val"], node.meta["val"]):
        return False
    a, b = tensors_of(example)[0], tensors_of(node)[0]
    if a.dtype != b.dtype:
        return False
    if not a.numel() or not b.numel():
        return a.numel() == b.numel()
    times, rest = divmod(b.numel(), a.numel())
    return not rest and batch % times == 0


def value_of(node: Node, per_example: bool) -> Value:
    """The value of a node as a policy sees it; without an operation if that is not known."""
    if per_example:
        target, args, kwargs, out = node.meta.get("custom", {}).get(EXAMPLE, (None, (), {}, None))
    else:
        target, out = node.target, node.meta["val"]
        args, kwargs = map_arg(node.args, _value), map_arg(node.kwargs, _value)
    own = isinstance(target, OpOverload) and not target.is_view
    return Value(target if own else None, args, kwargs, out)


_regions = itertools.count()


def names_of_node(node: Node) -> tuple[str, ...]:
    """The names that ``functx.checkpoint_name`` gave to a node's value."""
    return tuple(node.meta.get("custom", {}).get("functx_names", ()))


def saved_values(
    body: GraphModule, policy: Policy, per_example: bool = False
) -> dict[Node, Decision]:
    """The nodes of a region's graph whose values the policy saves.

    ``per_example`` means that the graph is batched, and the policy decides about one example.
    """
    found: dict[Node, Decision] = {}
    for node in body.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor | tuple):
            continue
        value = value_of(node, per_example)
        names = frozenset(names_of_node(node))
        # As in torch, the policy sees the operation first, and then the names.
        decision = Decision.RECOMPUTE if value.func is None else policy.decide(value)
        if names:
            value.names = names
            decision = policy.decide(value)
        if decision:
            found[node] = decision
    return found


def saving(
    body: GraphModule, policy: Policy | None, per_example: bool = False
) -> tuple[dict[Node, tuple[str, ...]], Any]:
    """Names for the values that a region saves, and a policy of ``jax.checkpoint`` with them."""
    if policy == Everything(True):
        return {}, jax.checkpoint_policies.everything_saveable
    found = {} if policy is None else saved_values(body, policy, per_example)
    region = next(_regions) if found else 0
    names: dict[Node, tuple[str, ...]] = {node: (f"functx.{region}.{node.name}",) for node in found}
    saved = [names[n][0] for n, decision in found.items() if decision is Decision.SAVE]
    offloaded = [names[n][0] for n, decision in found.items() if decision is Decision.OFFLOAD]
    policies = jax.checkpoint_policies
    if offloaded:
        return names, policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    return names, policies.save_only_these_names(*saved) if saved else None


def named(value: Any, *names: str) -> Any:
    """Give a value several names for ``jax.checkpoint``."""
    if isinstance(value, tuple | list):
        return type(value)([named(v, *names) for v in value])
    if isinstance(value, jax.Array):
        for name in names:
            value = checkpoint_name(value, name)
    return value


# Operations whose derivative torch computes from the result. JAX computes some of these from an
# intermediate value, which does not have the name of the result. So a region that saves the result
# by its name would still recompute it.
_TANGENTS: dict[str, Callable[..., Any]] = {
    "aten::tanh": lambda y, t: t * (1 - y * y),
    "aten::sigmoid": lambda y, t: t * (y * (1 - y)),
    "aten::exp": lambda y, t: t * y,
    "aten::exp2": lambda y, t: t * (y * jnp.log(2.0).astype(y.dtype)),
    "aten::expm1": lambda y, t: t * (y + 1),
    "aten::sqrt": lambda y, t: t / (2 * y),
    "aten::rsqrt": lambda y, t: t * (-0.5 * y**3),
    "aten::reciprocal": lambda y, t: t * (-y * y),
    "aten::relu": lambda y, t: jnp.where(y > 0, t, 0),
    "aten::_softmax": lambda y, t, dim, *_: y * (t - jnp.sum(y * t, dim, keepdims=True)),
    "aten::_log_softmax": lambda y, t, dim, *_: t - jnp.sum(jnp.exp(y) * t, dim, keepdims=True),
}


def from_result(
    name: str, compute: Callable[..., Any], args: tuple[Any, ...], mark: Callable[[Any], Any]
) -> Any:
    """``mark(compute(*args))``, with a derivative that reads the marked value if torch's does.

    ``name`` is the name of the operation, without its overload; ``mark`` gives the result a name.
    """
    tangent = _TANGENTS.get(name)
    x = args[0] if args else None
    real = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    if tangent is None or not real:
        return mark(compute(*args))

    @jax.custom_jvp
    def marked(x: Any) -> Any:
        return mark(compute(x, *args[1:]))

    @marked.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y = mark(compute(primals[0], *args[1:]))
        return y, tangent(y, tangents[0].astype(y.dtype), *args[1:])

    return marked(x)
