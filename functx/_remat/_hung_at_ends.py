"""Hooks that a body hangs on nodes where its tape ends.

NOTE [hooks at the ends]
A walk down from what a body makes (``y.grad_fn.next_functions``) ends at the nodes of stand-ins.
Without remat it comes to those of what these stand for: what accumulates the gradient of a weight,
as wrappers for parallel training look for, or what has computed an argument. A hook on a stand-in's
node would go with the throw-away tape. So when the body has run first, it is hung where it would
hang without remat, by the same handle; a stand-in's node lives until then if the other one does. A
replay hangs its own on nodes of its stand-ins, of which only gradients are taken: no backward pass
runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from functx import _torch_nodes
from functx._remat._hung_on_given import after_refused
from functx._remat._watch import watching
from functx._torch_edges import hung_how, node_lives, node_of


def lasting(stand_for: Iterable[tuple[Tensor, Tensor]]) -> list[Any]:
    """The nodes of stand-ins for what has a node that lives, whatever becomes of these."""
    with watching(False):
        return [
            node
            for t, standin in stand_for
            if (node := _end(standin)) is not None and node_lives(t)
        ]


def moved_outside(
    handles: Sequence[Any], stand_for: Iterable[tuple[Tensor, Tensor]]
) -> Sequence[Any]:
    """Hang hooks on nodes of stand-ins where they hang without remat; the nodes they hang on now.

    Args:
        handles: of hooks on nodes.
        stand_for: tensors from outside, each with its stand-in.
    """
    moved: list[Any] = []
    with watching(False):
        for t, standin in stand_for:
            node, there = _end(standin), None
            if node is None:
                continue
            for handle in handles:
                hangs = _torch_nodes.hook_of(handle) is not None
                if not hangs or (how := hung_how(node, handle)) is None:
                    continue
                there = node_of(t) if there is None else there
                _torch_nodes.rehang(handle, getattr(there, how))
            if there is not None:
                node.metadata["functx"] = there  # who holds the one holds the other
                moved.append(there)
    return moved


def refuse_on_leaves(handles: Sequence[Any], leaves: Iterable[Tensor], name: str) -> None:
    """Raise where a hook hangs on what accumulates the gradient of a leaf that the body made."""
    with watching(False):
        for t in leaves:
            node = _end(t)
            hung = (h for h in handles if node is not None and _torch_nodes.hook_of(h) is not None)
            if any(hung_how(node, h) for h in hung):
                raise after_refused(t, name)


def _end(t: Tensor) -> Any:
    """What accumulates the gradient of a leaf, while its level lives."""
    return node_of(t) if t.requires_grad and t.grad_fn is None else None
