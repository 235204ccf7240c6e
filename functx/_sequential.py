"""A chain of functions, cut into segments that keep what goes into them."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from functx import _schedules
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
    parts = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    for part in parts:
        check_callable(part, "remat_sequential")
    integer(segments, "remat_sequential: segments must be an int")
    if not 1 <= segments <= len(parts):
        raise ValueError(
            f"remat_sequential: {len(parts)} functions can be cut into 1 to {len(parts)} segments, "
            f"not {segments}"
        )
    cuts = _schedules.segments(len(parts), segments)
    for start, end in cuts[:-1]:
        o = Options(name=f"functions {start} to {end - 1} of remat_sequential")
        x = run(functools.partial(_composed, *parts[start:end]), (x,), {}, o)
    return _composed(*parts[cuts[-1][0] :], x)


def _composed(*functions_and_x: Any) -> Any:
    *functions, x = functions_and_x
    for function in functions:
        x = function(x)
    return x
