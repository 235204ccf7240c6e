"""Containers that are registered with torch, in optree.

``torch.utils._cxx_pytree`` copies classes that libraries register with ``torch.utils._pytree`` into
a namespace of optree. Both modules are private, and no public one does this.
"""

from __future__ import annotations

import contextlib
import functools

import torch.utils._cxx_pytree as _cxx_pytree
import torch.utils._pytree as _pytree

NAMESPACE = "torch"  # of optree, in which torch registers the classes


def register_new_classes() -> None:
    """Register classes with optree that torch knows and has not passed on.

    Those are, for example, the classes of ``torch.export.register_dataclass``.
    """
    _register(len(_pytree.SUPPORTED_NODES))


@functools.lru_cache(1)  # until there are more classes, or fewer
def _register(known: int) -> None:
    for cls, node in list(_pytree.SUPPORTED_NODES.items()):
        if isinstance(cls, type) and not issubclass(cls, tuple):
            with contextlib.suppress(ValueError):  # built in, or there already
                _cxx_pytree._private_register_pytree_node(cls, node.flatten_fn, node.unflatten_fn)
