"""The arguments and results of transforms and custom Functions inside of a region.

functorch wraps tensors in C++, where no mode sees it, and a wrapper can't be replaced later. So
functx's transforms first ask the enclosing region for stand-ins. Custom Functions do so, too,
because modes do not see their ``apply``. (Under transforms it is a higher-order operator, which
modes do see.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from functx._core import tree as _tree
from functx._core import uncompiled
from functx._remat import sharding
from functx._remat.listener import listening
from functx._remat.traced import unseen
from functx._torch import process_patches


def taken_in(title: str, tree: Any) -> Any:
    """The arguments of a transform, with stand-ins for foreign tensors."""
    listener = listening()
    return tree if listener is None else _exchanged(tree, partial(listener.take, title))


def made_inside(tree: Any) -> Any:
    """Number the results of a transform inside; returns them."""
    listener = listening()
    if listener is None:
        return tree
    listener.take("the results of a transform", [])
    listener = listener.listener()
    return _exchanged(tree, listener.give)


def _exchanged(tree: Any, exchange: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    leaves, spec = _tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for i, t in zip(places, exchange([leaves[i] for i in places])):
        leaves[i] = t
    return _tree.unflatten(spec, leaves)


def reported(f: Any, title: str) -> Any:
    """A transformed function ``f`` that reports its arguments to the enclosing region."""

    @wraps(f)
    def told(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return f(*args, **kwargs)
        args, kwargs = taken_in(title, (args, kwargs))
        with sharding.watching(title):
            return made_inside(f(*args, **kwargs))

    return told


@uncompiled
def _given_to_function(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Log ``function.apply`` as a call; returns its arguments, with stand-ins."""
    listener = listening(heard=True)
    if listener is None:
        return args
    _, *taken = listener.take(process_patches.APPLY, [function, *args])
    return tuple(taken)


process_patches.show_applications(_given_to_function)
process_patches.hide_nested_dummy(unseen)
