"""What is asked of values to raise an error, where there are no values to ask.

``torch.distributions`` reads whether parameters and samples are valid as a Python number, to raise
a ``ValueError``, and so does ``torch._check_tensor_all``, which models of transformers call.  A
function is traced before it has data, so the answer while it is traced is that they are valid, and
the question goes into the graph: where it turns out that they were not, every floating-point result
of the function (or of the region in it that asked) is NaN.  Other reads of values, a rejection
sampler's for one, are no such questions and are refused as anywhere.
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
    # The last one asks for the first two, since torch 2.15.
    "torch.distributions.": (
        "__init__",
        "_validate_sample",
        "check",
        "_all_true_or_runtime_assert",
    ),
    "torch": ("_check_tensor_all_with",),
}


def is_check(answer: torch.Tensor, again: bool) -> bool:
    """Whether a value that is read is such an answer; if so, the graph has it from now on.

    It has it already if the same code runs ``again``.
    """
    if not asked_by(_ASKING):
        return False
    if engine.proxy_mode() is not None and not again:
        _asked(answer)
    return True


def heed(module: GraphModule) -> None:
    """Make the results of a graph, and of the regions in it, depend on what was asked there."""
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
