"""``vmap`` as torch's, with dimensions of dicts by their keys.

torch takes ``in_dims`` and ``out_dims`` that are dicts in the order in which they were written, so
``{"b": 1, "a": 0}`` for ``{"a": ..., "b": ...}`` silently maps over the wrong dimensions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from functx import _remat, _torch, _tree
from functx._arrays import by_arguments
from functx._validate import Randomness

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
    mapped = vmap_by_keys(func, in_dims, out_dims, randomness, chunk_size=chunk_size)
    return _remat.by_primals(mapped, "vmap")


def vmap_by_keys(
    func: Callable[..., Any], in_dims: Any, out_dims: Any = 0, *options: Any, **named: Any
) -> Any:
    """`vmap` that regions around and JAX do not look at."""
    _use_mapped_masks()
    of_torch = torch.func.vmap(func, in_dims, out_dims, *options, **named)
    if not _has_dict(in_dims) and not _has_dict(out_dims):
        return of_torch

    @functools.wraps(of_torch)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        given = _by_leaf(in_dims, args) if _has_dict(in_dims) else in_dims
        if not _has_dict(out_dims):
            return torch.func.vmap(func, given, out_dims, *options, **named)(*args, **kwargs)
        dims: Any = []  # of each result; torch looks when the function has returned
        structure: list[_tree.TreeSpec] = []

        @functools.wraps(func)
        def flat(*args: Any, **kwargs: Any) -> list[Any]:
            result = func(*args, **kwargs)
            leaves, spec = _tree.flatten(result)
            try:
                structure[:], dims[:] = [spec], _tree.spread(out_dims, result)
            except ValueError as error:
                raise ValueError(
                    f"vmap: out_dims {out_dims!r} don't fit what the function returns: {error}"
                ) from None
            return leaves

        results = torch.func.vmap(flat, given, dims, *options, **named)(*args, **kwargs)
        return _tree.unflatten(structure[0], results)

    return mapped


def _by_leaf(in_dims: Any, args: tuple[Any, ...]) -> Any:
    """A dimension for each leaf of the arguments; what does not fit, torch refuses."""
    try:
        dims = zip(in_dims, args, strict=True)
        return tuple(_tree.unflatten(_tree.flatten(a)[1], _tree.spread(d, a)) for d, a in dims)
    except ValueError:
        return in_dims


def _has_dict(dims: Any) -> bool:
    """Whether a dict is somewhere in nested tuples, lists and dicts."""
    return isinstance(dims, dict) or (isinstance(dims, (tuple, list)) and any(map(_has_dict, dims)))


def _use_mapped_masks() -> None:
    """Let Hugging Face transformers, if loaded, use a mask of padding that ``vmap`` maps.

    Its models ask whether a mask masks anything, and go without one if not; of a mapped mask that
    can't be asked. Where a graph is traced they don't ask: mapped masks are treated alike.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    before = getattr(module, "is_tracing", None)
    if before is None or before.__module__ == __name__:
        return

    def is_tracing(tensor: Any = None) -> bool:
        return bool(before(tensor)) or _is_mapped(tensor)

    module.is_tracing = is_tracing


def _is_mapped(value: Any) -> bool:
    """Whether ``vmap`` maps a tensor, at any level."""
    while isinstance(value, torch.Tensor) and _torch.is_wrapped(value):
        if _torch.is_batched(value):
            return True
        value = _torch.inner_of(value)
    return False
