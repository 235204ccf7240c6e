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
from torch.fx import GraphModule, Node

from functx._save_policies import Decision, Everything, Policy
from functx.compat._to_jax.trace.one_example import value_of

_regions = itertools.count()


def names_of_node(node: Node) -> tuple[str, ...]:
    """What ``functx.checkpoint_name`` called a node's value."""
    return tuple(node.meta.get("custom", {}).get("functx_names", ()))


def kept_values(
    body: GraphModule, policy: Policy, per_example: bool = False
) -> dict[Node, Decision]:
    """The nodes of a region's graph whose values the policy keeps.

    Args:
        body: the graph.
        policy: what to ask.
        per_example: whether the graph is batched, and the policy asked about one example.
    """
    found: dict[Node, Decision] = {}
    for node in body.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor | tuple):
            continue
        value = value_of(node, per_example)
        names = frozenset(names_of_node(node))
        # First the operation, then its names, as they come in torch.
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
    """Names for the values that a region keeps, and what ``jax.checkpoint`` takes as its policy."""
    if policy == Everything(True):
        return {}, jax.checkpoint_policies.everything_saveable
    kept = {} if policy is None else kept_values(body, policy, per_example)
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
