"""Custom Functions whose backward runs when their level has ended.

Such a backward finds wrappers of a dead level in ``ctx.saved_tensors`` and in its cotangents.
torch's operations unwrap these, and so do functx's transforms, but ``torch.func.vjp`` does not:
adjoints and implicit layers would meet an internal assert. At a level of functorch torch makes a
class for each call of a Function; unwrapping is added to that class, and so to the one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functx import _torch
from functx._torch import function_classes as function_classes


def unwrap_for_backward(edges: Sequence[Any], classes: str) -> None:
    """Let the custom Functions on a tape find what they saved without dead wrappers.

    It begins at ``edges``, or tensors. ``classes`` is what `function_classes` said before it.
    """
    if function_classes() == classes:
        return  # no custom Function was applied
    todo: list[Any] = [e.grad_fn if isinstance(e, Tensor) else e and e.node for e in edges]
    seen: set[Any] = {None}
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [below for below, _ in node.next_functions]
            made_for = getattr(node, "_forward_cls", None)
            if made_for is not None and made_for.__module__ == _torch.MADE_FOR_ONE_CALL:
                _unwrap(type(node), made_for)


def _unwrap(node: Any, function: Any) -> None:
    saved, backward, alive = node.saved_tensors, function.backward, _torch.alive
    node.saved_tensors = property(lambda ctx: (*map(alive, saved.__get__(ctx)),))
    function.backward = staticmethod(lambda ctx, *grads: backward(ctx, *map(alive, grads)))
