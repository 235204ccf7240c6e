"""Results of a region that follow, on the tape, from others that the region computes them from.

NOTE [follows]
All results of a region are behind one node. What a region has written to has a node of its own
above that, where ``z.grad_fn`` is that of the write. So the tape would not tell that another result
is computed from it, and a backward pass from that, which asks for the gradient of ``z`` alone,
would come by no node of the region's: the gradient would be nothing, in silence. So such a result
is given a node above the region's, in place, which has an edge to that of ``z`` as well. By this
nothing flows. But the engine comes by the node, which looks who looks at ``z``: what flows there
inside of the region is in no part that it is given. ``NOTE [part of a gradient]`` in `_partial`.

Only regions that write to what has a history have such nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functx import _torch, _torch_nodes


class Follows(_torch.SingleLevelFunction):
    """Makes a result follow from what it is computed from inside of the region, in place.

    Nothing flows there by this, as it does in the replay. But the engine comes by.
    """

    @staticmethod
    def forward(ctx: Any, look: Callable[[Any], None], t: Tensor, *others: Tensor) -> Tensor:
        ctx.look = look
        ctx.others = [(one.shape, one.dtype, one.device) for one in others]
        ctx.compiled = False
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(t)
        return t

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> tuple[Tensor | None, ...]:
        if cotangent is not None:
            ctx.look([node for node, _ in ctx.next_functions[1:]])
        if not ctx.compiled:
            return None, cotangent, *[None] * len(ctx.others)
        return None, cotangent, *(torch.zeros(s, dtype=d, device=on) for s, d, on in ctx.others)


_NODES: Any = _torch.kind_of_nodes(Follows)


def _compiled(node: Any) -> None:
    """Compiled autograd adds up what comes by all edges."""
    node.compiled = True


def _hung(node: Any, t: Tensor, hooks: Any, hang: Any) -> bool:
    """As a result of a region's node tells it. `_in_turn`."""
    of, n = made_by((node, 0))
    region, key = of.payload.region, (of.payload.level, of.payload.places[n])
    region.hung = {**region.hung, key: weakref.ref(hooks)}
    return False


_torch_nodes.let_compiled_autograd_see(Follows, _compiled)
_torch_nodes.tell_of_hooks(Follows, _hung)


def made_by(edge: tuple[Any, int]) -> tuple[Any, int]:
    """The node that made a tensor, if it has been made to follow from others since."""
    while isinstance(edge[0], _NODES):
        edge = edge[0].next_functions[0]
    return edge
