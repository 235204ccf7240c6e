"""What a region with a policy saves in JAX: the values that the policy keeps in torch, by name.

The policy is asked here, about the ATen operations of the region's graph on one example, as in
torch; what it keeps gets a name of its own, and ``jax.checkpoint`` saves these names.  So neither
JAX's own idea of an operation nor a ``jax.vmap`` around it changes what is kept.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import torch
from jax.ad_checkpoint import checkpoint_name
from torch.fx import GraphModule, Node, map_arg

from functx._policies import Decision, Everything, Policy, Value
from functx.compat._lowering._graph import MODULE
from functx.compat._torch import OpOverload

_regions = itertools.count()


def names_of_node(node: Node) -> tuple[str, ...]:
    """What ``functx.checkpoint_name`` called a node's value."""
    return tuple(node.meta.get("custom", {}).get("functx_names", ()))


def kept_values(body: GraphModule, policy: Policy) -> dict[Node, Decision]:
    """The nodes of a region's graph whose values the policy keeps."""
    found: dict[Node, Decision] = {}
    for number, node in enumerate(body.graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor | tuple):
            continue
        own = isinstance(node.target, OpOverload) and not node.target.is_view
        names = frozenset(names_of_node(node))
        if not own and not names:
            continue
        value = Value(
            node.target if own else None,
            map_arg(node.args, _example),
            map_arg(node.kwargs, _example),
            node.meta["val"],
            number,
            lambda node=node: node.meta.get("custom", {}).get(MODULE, ""),  # type: ignore[misc]
        )
        # First the operation, then its names, as they come in torch.
        decision = policy.decide(value) if own else Decision.RECOMPUTE
        if names:
            value.names = names
            decision = policy.decide(value)
        if decision:
            found[node] = decision
    return found


def _example(node: Node) -> Any:
    return node.meta.get("val", node)


def saving(body: GraphModule, policy: Policy | None) -> tuple[dict[Node, tuple[str, ...]], Any]:
    """Names for the values that a region keeps, and what ``jax.checkpoint`` takes as its policy."""
    if policy == Everything(True):
        return {}, jax.checkpoint_policies.everything_saveable
    kept = {} if policy is None else kept_values(body, policy)
    region = next(_regions) if kept else 0
    names: dict[Node, tuple[str, ...]] = {node: (f"functx.{region}.{node.name}",) for node in kept}
    saved = [names[n][0] for n, decision in kept.items() if decision is Decision.SAVE]
    offloaded = [names[n][0] for n, decision in kept.items() if decision is Decision.OFFLOAD]
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
    """A value under each of some names."""
    if isinstance(value, tuple | list):
        return type(value)([named(v, *names) for v in value])
    if isinstance(value, jax.Array):
        for name in names:
            value = checkpoint_name(value, name)
    return value
