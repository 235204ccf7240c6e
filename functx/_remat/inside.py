"""For transforms that are called inside of a region: what they are given, and what they make.

functorch wraps tensors in C++, where no mode sees it, and a wrapper can't be exchanged afterwards.
So functx's transforms ask the region around them for stand-ins first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functx import _tree
from functx._remat.calls import listening


def taken_in(title: str, tree: Any) -> Any:
    """The arguments of a transform, foreign tensors as stand-ins."""
    listener = listening()
    if listener is None:
        return tree
    leaves, spec = _tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for i, t in zip(places, listener.take(title, [leaves[i] for i in places])):
        leaves[i] = t
    return _tree.unflatten(spec, leaves)


def made_inside(tree: Any) -> Any:
    """The results of a transform."""
    listener = listening()
    if listener is not None:
        listener.give([leaf for leaf in _tree.leaves(tree) if isinstance(leaf, Tensor)])
    return tree
