"""`remat_sequential` and `checkpoint_sequential`: chains of functions, cut into segments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from functx import _schedules
from functx._checkpoint import checkpoint
from functx._remat import Options, run
from functx._validate import check_callable, integer


def remat_sequential(functions: Any, segments: int, x: Any) -> Any:
    """``x`` through ``functions``, in segments of which each keeps only what goes into it.

    As :func:`torch.utils.checkpoint.checkpoint_sequential`, under every transform: all segments
    but the last are regions of `functx.remat`. The last is pulled back first, so that it would be
    run again at once; it is left as it is.

    Args:
        functions: an ``nn.Sequential``, or callables; each is called with what the last returned.
        segments: into how many runs of functions to cut; their lengths differ by one at most.
        x: what the first function is called with, any pytree.

    Returns:
        What the last function returned.

    Raises:
        TypeError: ``functions`` are not callable, or ``segments`` is no int.
        ValueError: ``segments`` is not between 1 and the number of functions.

    Example:
        >>> import torch, functx
        >>> layers = [torch.nn.Linear(3, 3) for _ in range(6)]
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> functx.remat_sequential(layers, 3, x).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 3])
    """
    parts, segments = _checked(functions, segments, "remat_sequential")
    cuts = _schedules.segments(len(parts), segments)
    for start, end in cuts[:-1]:
        o = Options(name=f"functions {start} to {end - 1} of remat_sequential")
        x = run(functools.partial(_composed, *parts[start:end]), (x,), {}, o)
    return _composed(*parts[cuts[-1][0] :], x)


def checkpoint_sequential(
    functions: Sequence[Callable[[Any], Any]] | nn.Sequential,
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """A chain of functions in ``segments`` pieces, all but the last of which are regions.

    Takes what `torch.utils.checkpoint.checkpoint_sequential` takes, and cuts where it cuts: pieces
    of ``len(functions) // segments`` functions, the rest in the last one.

    Args:
        functions: an ``nn.Sequential``, or the functions in order.
        segments: how many pieces, from 1 to the number of functions.
        input: what the first function takes.
        use_reentrant: as for `checkpoint`.
        **kwargs: further options of `checkpoint`, ``preserve_rng_state`` for one.

    Returns:
        What the last function returns.

    Raises:
        TypeError: ``segments`` is no integer, or ``functions`` are none.
        ValueError: ``segments`` is out of range, or an option is not known.

    Example:
        >>> import torch, functx
        >>> chain = [torch.sin, torch.cos, torch.sin, torch.cos]
        >>> x = torch.zeros(2, requires_grad=True)
        >>> functx.checkpoint_sequential(chain, 2, x, use_reentrant=False).shape
        torch.Size([2])
    """
    unknown = kwargs.keys() - checkpoint.__kwdefaults__.keys()
    if unknown:
        raise ValueError(
            f"Unexpected keyword arguments: {','.join(sorted(unknown))}. checkpoint_sequential "
            f"knows {', '.join(sorted(checkpoint.__kwdefaults__))}."
        )
    parts, segments = _checked(functions, segments, "checkpoint_sequential")
    size = len(parts) // segments
    for number in range(segments - 1):
        piece = functools.partial(_composed, *parts[number * size : (number + 1) * size])
        input = checkpoint(piece, input, use_reentrant=use_reentrant, **kwargs)
    return _composed(*parts[size * (segments - 1) :], input)


def _checked(functions: Any, segments: Any, api: str) -> tuple[list[Callable[[Any], Any]], int]:
    """The functions in order, and into how many segments to cut them."""
    parts = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    for part in parts:
        check_callable(part, api)
    segments = integer(segments, f"{api}: segments must be an int")
    most = max(len(parts), 1)
    if not 1 <= segments <= most:
        raise ValueError(
            f"{api}: {len(parts)} functions can be cut into 1 to {most} segments, not {segments}"
        )
    return parts, segments


def _composed(*functions_and_x: Any) -> Any:
    *functions, x = functions_and_x
    for function in functions:
        x = function(x)
    return x
