"""Tapes and wrappers: who knows a tensor, where a tape ends, and what wrappers are around."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._torch_edges import requires_grad_anywhere

PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types of tensors that hold one piece of memory and hide no other tensors."""


def nodes_of(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Where the tapes of some tensors begin, those of all levels."""
    nodes = []
    for value in tensors:
        while value is not None:
            if value.grad_fn is not None:
                nodes.append(value.grad_fn)
            value = _torch.get_unwrapped(value) if _torch.is_wrapped(value) else None
    return nodes


def edges_of(value: Tensor | None) -> list[tuple[Any, int]]:
    """The nodes that made a tensor, those of all levels, and which result of theirs it is."""
    edges = []
    while value is not None:
        if value.grad_fn is not None:
            edges.append((value.grad_fn, value.output_nr))
        value = _torch.get_unwrapped(value) if _torch.is_wrapped(value) else None
    return edges


def leaves_below(*nodes: Any) -> list[Tensor]:
    """The leaf tensors that the tape below some nodes ends in."""
    return tape_below(nodes)[1]


def tape_below(nodes: Iterable[Any]) -> tuple[list[Any], list[Tensor]]:
    """The nodes of the tape that begins with some, and the leaf tensors that it ends in."""
    found: list[Tensor] = []
    stack = list(dict.fromkeys(nodes))
    seen = {None, *stack}
    for current in stack:  # which grows
        if following := current.next_functions:
            for node, _ in following:
                if node not in seen:
                    seen.add(node)
                    stack.append(node)
        elif (leaf := leaf_of(current)) is not None:
            found.append(leaf)
    return stack, found


def leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient a node accumulates, unless it has been given a history since."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def leads_to(node: Any, leaves: Container[int], before: Iterable[Any] = ()) -> bool:
    """Whether the tape below a node ends in one of some leaves, as far as a short walk tells.

    Args:
        node: where it begins.
        leaves: by id.
        before: nodes that are older than all of these.
    """
    stack, seen = [node], {None, node, *before}
    for current in stack:  # which grows
        for below, _ in current.next_functions:
            if below not in seen:
                seen.add(below)
                stack.append(below)
                if type(below).__name__ == "AccumulateGrad" and id(below.variable) in leaves:
                    return True
        if len(stack) > _SHORT:
            break
    return False


_SHORT = 1000  # nodes


def edges_below(edge: tuple[Any, int]) -> Iterator[tuple[Any, int]]:
    """A result of a node and those that it comes from; for a leaf's node, the leaf."""
    stack, seen = [edge], {edge}
    for node, i in stack:  # which grows
        yield node, i
        for below in getattr(node, "next_functions", ()):
            if type(below[0]).__name__ == "AccumulateGrad":
                below = below[0].variable, 0
            if below[0] is not None and below not in seen:
                seen.add(below)
                stack.append(below)


def tensors_of(*trees: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    found: list[Tensor] = []
    for x in trees:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            if x:
                found += tensors_of(*x)
        elif isinstance(x, dict) and x:
            found += tensors_of(*x.values())
    return found


def tracked(t: Tensor) -> bool:
    """Whether any tape or transform knows ``t``."""
    if t.requires_grad or _torch.is_wrapped(t):
        return True
    return (
        _torch.forward_ad_level() >= 0
        and torch.autograd.forward_ad.unpack_dual(t).tangent is not None
    )


def of_ended_level(t: Tensor) -> bool:
    """Whether ``t`` is, or has inside, a wrapper of a transform that has ended."""
    while _torch.unwrap_if_dead(t) is t:
        if not _torch.is_wrapped(t):
            return False
        t = _torch.get_unwrapped(t)
    return True


def below(t: Tensor, depth: int) -> Tensor:
    """What wrappers of levels deeper than ``depth`` are around."""
    while _torch.is_wrapped(t) and _torch.wrapper_level(t) > depth:
        t = _torch.get_unwrapped(t)
    return t


def batched(t: Tensor) -> bool:
    """Whether a ``vmap`` has different values of ``t`` for its examples."""
    while _torch.is_wrapped(t):
        if _torch.is_batched(t):
            return True
        t = _torch.get_unwrapped(t)
    return False


def with_no_leaves(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """``f`` of tensors that are no leaves.

    A hook on several tensors asks which of them a backward pass reaches; in that of a replay, which
    is for the leaves, torch refuses to say it of those.
    """
    given = [t.view_as(t) if isinstance(t, Tensor) and t.requires_grad else t for t in args]
    return f(*given, **kwargs)


def rewrap(t: Tensor, depth: int, value: Tensor, *, with_grad: bool = False) -> Tensor:
    """``t``, a wrapper of levels above ``depth``, around ``value`` instead of what is `below`.

    Args:
        t: the wrapper; else the result is ``value``.
        depth: a level.
        value: of that level, or below.
        with_grad: whether the new wrappers require grad where those of ``t`` do.
    """
    if not _torch.is_wrapped(t) or _torch.wrapper_level(t) <= depth:
        return value
    level = _torch.wrapper_level(t)
    inner = rewrap(_torch.get_unwrapped(t), depth, value, with_grad=with_grad)
    if _torch.is_batched(t):
        return _torch.add_batch_dim(inner, _torch.batch_dim(t), level)
    wrapper = _torch.wrap_for_grad(inner, level)
    if with_grad and t.requires_grad:
        _torch.require_grad(wrapper)  # what it returns may be a wrapper of the innermost level
    return wrapper


def anonymous_below(t: Tensor, depth: int) -> bool:
    """Whether nobody has a name for what is `below`, and no tape knows it.

    So it is with the alias that C++ makes of a primal to put it into a dual; a tensor from outside
    has a name there.
    """
    inner = [below(t, depth)]
    return held_by_python(inner) <= 0 and not requires_grad_anywhere(inner[0])


def held_by_python(cell: list[Tensor]) -> int:
    """How many references Python has to the tensor in ``cell``, beside that list.

    The caller must have it in no variable and pass it to nothing: how much those count depends on
    the version of Python, and on whether a compiler, say, has asked to see its frames.
    """
    # C++ (a cache of autocast, a tape) has one reference, however often it holds the tensor.
    return sys.getrefcount(cell[0]) - _LOOKING - (_torch.use_count(cell[0]) > 1)


_LOOKING = 0
_LOOKING = held_by_python([torch.empty(0)])
