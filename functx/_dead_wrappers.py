"""Custom Functions whose backward runs when their level has ended.

What such a backward finds in ``ctx.saved_tensors``, and its cotangents, are then wrappers of a dead
level. torch's operations unwrap these, and so do functx's transforms, but ``torch.func.vjp`` does
not: adjoints and implicit layers would meet an internal assert. So they are unwrapped before.

At a level of functorch torch makes a class for each call of a Function; what is changed here is
that class, and with it the one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functx import _torch
from functx._torch import function_classes as function_classes


def unwrap_for_backward(edges: Sequence[Any], classes: str) -> None:
    """Let the custom Functions on a tape find what they saved without dead wrappers.

    Args:
        edges: where the tape begins: edges, or tensors.
        classes: what `function_classes` said before the tape was recorded.
    """
    if function_classes() == classes:
        return  # no custom Function was applied
    todo = [_node_of(e) for e in edges]
    seen = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [below for below, _ in node.next_functions]
        made_for = getattr(node, "_forward_cls", None)
        if made_for is not None and made_for.__module__ == _torch.MADE_FOR_ONE_CALL:
            _unwrap(type(node), made_for)


def _node_of(edge: Any) -> Any:
    if edge is None or isinstance(edge, Tensor):
        return None if edge is None else edge.grad_fn
    return edge.node


def _unwrap(node: Any, function: Any) -> None:
    saved, backward = node.saved_tensors, function.backward
    node.saved_tensors = property(lambda ctx: _alive(saved.__get__(ctx)))
    function.backward = staticmethod(lambda ctx, *grads: backward(ctx, *_alive(grads)))


def _alive(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_torch.alive(v) if isinstance(v, Tensor) else v for v in values)
