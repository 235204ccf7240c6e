"""Containers that torch knows as pytrees and JAX does not: torch's named results, other libraries'.

Such a type is registered with JAX when a lowered function first returns or takes one, taken apart
and put together as torch does it, so that results keep their type (``out.logits``, ``out.values``).
"""

from __future__ import annotations

import threading
from typing import Any

import jax

from functx.compat._torch import pytree_node

_lock = threading.Lock()
_taught: set[type] = set()


class _Context:
    """What torch keeps beside the children; JAX wants it hashable."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


def teach_jax(tree: Any) -> bool:
    """Register the types of a tree's leaves that only torch can take apart.

    Returns:
        Whether there were any; the tree has more leaves now.
    """
    found = {type(leaf) for leaf in jax.tree_util.tree_leaves(tree)}
    new = [t for t in found if pytree_node(t) is not None]
    for cls in new:
        _register(cls)
    return bool(new)


def _register(cls: type) -> None:
    node: Any = pytree_node(cls)

    def flatten(x: Any) -> tuple[tuple[Any, ...], _Context]:
        children, context = node.flatten_fn(x)
        return tuple(children), _Context(context)

    def unflatten(context: _Context, children: Any) -> Any:
        return node.unflatten_fn(list(children), context.value)

    with _lock:
        if cls not in _taught:
            jax.tree_util.register_pytree_node(cls, flatten, unflatten)
            _taught.add(cls)
