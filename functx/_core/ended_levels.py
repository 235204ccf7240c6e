"""Custom Functions whose backward runs after their functorch level has ended.

Such a backward finds wrappers of the ended level in ``ctx.saved_tensors`` and in its cotangents.
torch's operations unwrap these, and so do functx's transforms, but ``torch.func.vjp`` does not: a
backward that calls it (adjoint methods and implicit layers do) would fail at an internal assert.
Inside a transform, torch makes a new class for each call of a Function, so unwrapping can be added
to the class and affects one node alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functx import _torch
from functx._torch import function_classes as function_classes


def unwrap_for_backward(edges: Sequence[Any], classes: str) -> None:
    """Let the custom Functions on a tape read what they saved without wrappers of ended levels.

    Args:
        edges: where the tape begins; gradient edges or tensors.
        classes: the value of `function_classes` before the tape was recorded.
    """
    if function_classes() == classes:
        return  # no custom Function was applied on this tape
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
