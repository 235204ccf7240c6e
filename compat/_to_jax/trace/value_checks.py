"""Value checks that raise an error in torch and give NaN in JAX.

``torch.distributions`` reads from tensors whether parameters and samples are valid, and raises a
``ValueError`` if not. So does ``torch._check_tensor_all``, which models of transformers call. A
function is traced before it has data. So during the trace such a check passes, and its condition is
added to the graph. If the condition is false at a call, every floating-point result of the function
(or of the region that contains the check) is NaN. Other code that reads values, such as a rejection
sampler, raises an error in the trace as usual.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import torch
from torch.fx import GraphModule, Node, has_side_effect

from functx import _torch as engine
from functx._core import has_derivatives
from functx._torch.lowering import asked_by
from functx.compat._to_jax.nodes import body_of, is_region
from functx.compat._to_jax.rules.table import rule

_library = torch.library.Library("functx", "FRAGMENT")
_library.define("asked(Tensor valid) -> Tensor")
_library.define("unless(Tensor x, Tensor[] valid) -> Tensor")
_library.impl("asked", lambda valid: valid.clone(), "CompositeExplicitAutograd")
_library.impl("unless", lambda x, valid: x.clone(), "CompositeExplicitAutograd")

_asked = has_side_effect(torch.ops.functx.asked.default)  # nothing reads it
_unless = torch.ops.functx.unless.default
_ASKING = {
    # Since torch 2.15 the last function is called by the first two.
    "torch.distributions.": (
        "__init__",
        "_validate_sample",
        "check",
        "_all_true_or_runtime_assert",
    ),
    "torch": ("_check_tensor_all_with",),
}


def is_check(answer: torch.Tensor, again: bool) -> bool:
    """Whether ``answer`` is read by a value check. If so, add its condition to the graph.

    With ``again``, the same code has run before, and the graph has the condition already.
    """
    if not asked_by(_ASKING):
        return False
    if engine.proxy_mode() is not None and not again:
        _asked(answer)
    return True


def heed(module: GraphModule) -> None:
    """Make the results of a graph, and of each region in it, depend on the checks in it."""
    graph = module.graph
    for node in graph.nodes:
        if is_region(node):
            heed(body_of(node))
    asking = [node for node in graph.nodes if node.target is _asked]
    if not asking:
        return
    answers = [node.args[0] for node in asking]
    output = next(iter(reversed(graph.nodes)))

    def heeding(out: Node) -> Node:
        value = out.meta.get("val")
        if not has_derivatives(value):
            return out
        with graph.inserting_before(output):
            made = graph.call_function(_unless, (out, answers))
        made.meta["val"] = value
        return made

    output.args = torch.fx.map_arg(output.args, heeding)
    for node in asking:
        graph.erase_node(node)
    module.recompile()


@rule("functx::unless")
def _nan_unless(x: Any, valid: list[Any]) -> Any:
    factor = jnp.where(jnp.all(jnp.stack([v.astype(bool) for v in valid])), 1, math.nan)
    return x * factor.astype(x.dtype)
