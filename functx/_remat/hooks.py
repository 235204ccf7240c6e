"""Hooks on the nodes and results of regions.

The results of a region at one level hang on one node. A hook on that node, or on a result, that
pulls back another result of the region would run the node again, and with it the hook, for ever:
torch's engine nests such passes in threads, where no limit of recursion and no interrupt ends them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from functx import _torch
from functx._core import RematError
from functx._remat.node import RegionNode


def _not_inside_itself(node: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls ``hook``, and raises an error if it is called again before it returns."""
    title, running = node.payload.region.title, set[int]()

    def run(*gradients: Any) -> Any:
        thread = threading.get_ident()
        if thread in running:
            raise RematError(
                f"remat: a hook on a result of {title}, or on its grad_fn, pulls back through the "
                "same node, because all results of a region share one node. It would call itself "
                "for ever. Register the hook on a tensor computed from the result (y * 1), or make "
                "a separate region for each result."
            )
        running.add(thread)
        try:
            return hook(*gradients)
        finally:
            running.discard(thread)

    return run


_torch.wrap_node_hooks(RegionNode, _not_inside_itself)
