"""``vmap``: torch's ``vmap``, which regions can record and Hugging Face's masks accept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from functx import _remat, _torch
from functx._core import Randomness, dispatches_on_arguments
from functx._torch.process_patches import use_mapped_masks

P = ParamSpec("P")
R = TypeVar("R")


@dispatches_on_arguments
def vmap(
    func: Callable[P, R],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: Randomness = "error",
    *,
    chunk_size: int | None = None,
) -> Callable[P, R]:
    """Map a function over a dimension of its arguments: :func:`torch.func.vmap`."""
    use_mapped_masks()
    of_torch = torch.func.vmap(func, in_dims, out_dims, randomness, chunk_size=chunk_size)

    @functools.wraps(of_torch)
    def mapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return of_torch(*args, **kwargs)
        entry = _remat.StackGuard(None)
        try:
            with _torch.RequiresGradAllowed():
                return of_torch(*args, **kwargs)
        except BaseException:
            entry.failed()
            raise

    return _remat.reported(mapped, "vmap")
