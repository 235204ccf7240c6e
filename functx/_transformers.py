"""Caches of keys and values, which checkpointed layers of transformers go without."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import nn


def is_marked_layer(module: nn.Module) -> bool:
    """Whether this is a ``GradientCheckpointingLayer`` of transformers."""
    return any(
        c.__name__ == "GradientCheckpointingLayer" and c.__module__.startswith("transformers.")
        for c in type(module).__mro__
    )


def without_cache(layer: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with ``use_cache=False``, and without an empty cache, as in transformers itself.

    A cache that holds something (a trained prefix, the states of a prompt) is left: the layer reads
    it, and the region refuses it. A warning names the class of the ``layer``.
    """
    uses_cache = kwargs.get("use_cache") is True
    if uses_cache or any(map(_is_empty, (*args, *kwargs.values()))):
        _warn_once(layer)
    args = tuple(None if _is_empty(a) else a for a in args)
    kwargs = {name: None if _is_empty(a) else a for name, a in kwargs.items()}
    return args, kwargs | ({"use_cache": False} if uses_cache else {})


def _is_empty(cache: Any) -> bool:
    """Whether this is a cache that holds nothing."""
    length = getattr(cache, "get_seq_length", None)
    return length is not None and not length()


@functools.cache
def _warn_once(layer: str) -> None:
    warnings.warn(
        f"functx: {layer} is a region and a derivative is taken, so no cache of keys and values is "
        "used. Pass use_cache=False to silence this.",
        stacklevel=2,
    )
