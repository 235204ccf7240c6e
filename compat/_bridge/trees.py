"""Register with JAX the classes that are pytrees for torch, but not for JAX.

These are torch's named results and classes of other libraries. Such a class is registered when a
lowered function first takes or returns an instance. It is flattened and unflattened as in torch, so
results keep their type (``out.logits``, ``out.values``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from functx._core import ENDLESS
from functx._torch.lowering import pytree_node

_lock = threading.Lock()


@dataclass(frozen=True)
class _Context:
    """The context that torch returns with the children, made hashable, as JAX requires."""

    value: Any

    def __hash__(self) -> int:
        return hash(repr(self.value))


@contextmanager
def endless_refused() -> Iterator[None]:
    """A context that explains jaxlib's SystemError for a container that contains itself."""
    try:
        yield
    except SystemError as error:
        if not isinstance(error.__cause__, RecursionError):
            raise
        raise RecursionError(ENDLESS) from error


def teach_jax(tree: Any) -> bool:
    """Register the classes of JAX's leaves of ``tree`` that are pytrees for torch.

    Returns:
        Whether there were any. If so, ``tree`` has other leaves now.
    """
    with endless_refused():
        found = {type(leaf) for leaf in jax.tree_util.tree_leaves(tree)}
    new = [cls for cls in found if pytree_node(cls) is not None]
    for cls in new:
        with _lock:
            _register(cls)  # type: ignore[arg-type]
    return bool(new)


@functools.cache
def _register(cls: type) -> None:
    node: Any = pytree_node(cls)

    def flatten(x: Any) -> tuple[tuple[Any, ...], _Context]:
        children, context = node.flatten_fn(x)
        return tuple(children), _Context(context)

    def unflatten(context: _Context, children: Any) -> Any:
        return node.unflatten_fn(list(children), context.value)

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
