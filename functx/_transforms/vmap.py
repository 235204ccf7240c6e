"""``vmap``: torch's, which regions around and masks of Hugging Face's models get along with."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from functx import _remat, _torch
from functx._core import Randomness, by_arguments

P = ParamSpec("P")
R = TypeVar("R")


@by_arguments
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
        with _torch.RequiresGradAllowed():
            return of_torch(*args, **kwargs)

    return _remat.by_primals(mapped, "vmap")


def use_mapped_masks() -> None:
    """Let Hugging Face transformers, if loaded, use a mask of padding that ``vmap`` maps.

    Its models ask whether a mask masks anything, and go without one if not; of a mapped mask that
    can't be asked. Where a graph is traced they don't ask: mapped masks are treated alike.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    before = getattr(module, "is_tracing", None)
    if before is not None and before.__module__ != __name__:

        def is_tracing(tensor: Any = None) -> bool:
            return bool(before(tensor)) or is_mapped(tensor)

        module.is_tracing = is_tracing


def is_mapped(value: Any) -> bool:
    """Whether ``vmap`` maps a tensor, at any level: the examples have values of their own."""
    while isinstance(value, torch.Tensor) and _torch.is_wrapped(value):
        if _torch.is_batched(value):
            return True
        value = _torch.inner_of(value)
    return False
