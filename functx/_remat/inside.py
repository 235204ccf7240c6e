"""For transforms that are called inside of a region: what they are given, and what they make.

functorch wraps tensors in C++, where no mode sees it, and a wrapper can't be exchanged afterwards.
So functx's transforms ask the region around them for stand-ins first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from functx import _tree
from functx._remat.calls import Call
from functx._remat.listener import listening


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
    if listener is None:
        return tree
    leaves, spec = _tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    listener.log(Call("the results of a transform", []))
    for i, t in zip(places, listener.give([leaves[i] for i in places])):
        leaves[i] = t
    return _tree.unflatten(spec, leaves)


def by_arguments(transform: Any) -> Any:
    """A transform of functions that tells the region around what the function it makes is given."""
    name = transform.__name__

    @functools.wraps(transform)
    def told(func: Any, *options: Any, **named: Any) -> Any:
        own = transform(func, *options, **named)

        @functools.wraps(own)
        def transformed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return own(*args, **kwargs)
            args, kwargs = taken_in(name, (args, kwargs))
            return made_inside(own(*args, **kwargs))

        return transformed

    return told


def by_primals(transform: Any) -> Any:
    """A transform that is given a function and its arguments at once, likewise."""
    name = transform.__name__

    @functools.wraps(transform)
    def told(func: Any, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return transform(func, *args, **named)
        args, named = taken_in(name, (args, named))
        return made_inside(transform(func, *args, **named))

    return told
