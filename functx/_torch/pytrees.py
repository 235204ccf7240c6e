"""Register with optree the containers that are registered with torch.

``torch.utils._cxx_pytree`` copies classes that libraries register with ``torch.utils._pytree`` into
a namespace of optree. Both modules are private, and no public module does this.
"""

from __future__ import annotations

import contextlib
import functools

import torch.utils._cxx_pytree as _cxx_pytree
import torch.utils._pytree as _pytree

NAMESPACE = "torch"  # of optree, in which torch registers the classes


def register_new_classes() -> None:
    """Register with optree the classes that torch itself has not copied there.

    Those are, for example, the classes of ``torch.export.register_dataclass``.
    """
    _register(len(_pytree.SUPPORTED_NODES))


@functools.lru_cache(1)  # runs again only when the number of classes has changed
def _register(num_classes: int) -> None:
    for cls, node in list(_pytree.SUPPORTED_NODES.items()):
        if isinstance(cls, type) and not issubclass(cls, tuple):
            with contextlib.suppress(ValueError):  # built in, or registered already
                _cxx_pytree._private_register_pytree_node(cls, node.flatten_fn, node.unflatten_fn)
