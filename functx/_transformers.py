"""Caches of keys and values, which checkpointed layers of transformers go without."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

_CACHES = ("past_key_values", "past_key_value", "layer_past")


def is_marked_layer(module: nn.Module) -> bool:
    """Whether this is a ``GradientCheckpointingLayer`` of transformers."""
    return any(
        c.__name__ == "GradientCheckpointingLayer" and c.__module__.startswith("transformers.")
        for c in type(module).__mro__
    )


def positional(forward: Any) -> list[str]:
    """The names of positional parameters."""
    return [
        p.name
        for p in inspect.signature(forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def without_cache(
    layer: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with ``use_cache=False``, and without an empty cache, as in transformers itself.

    A cache that holds something (a trained prefix, the states of a prompt) is left: the layer reads
    it, and the region refuses it.

    Args:
        layer: the class of the layer, for the warning.
        names: of its positional parameters.
        args: positional arguments.
        kwargs: the others.
    """
    given = dict(zip(names, args)) | kwargs
    dropped = {name: None for name in _CACHES if _is_empty(given.get(name))}
    if given.get("use_cache") is True:
        dropped["use_cache"] = False  # type: ignore[assignment]
    if not dropped:
        return args, kwargs
    _warn_once(layer)
    args = (*(dropped.get(name, a) for name, a in zip(names, args)), *args[len(names) :])
    return args, kwargs | {k: v for k, v in dropped.items() if k in kwargs}


def _is_empty(cache: Any) -> bool:
    length = getattr(cache, "get_seq_length", None)
    return length is not None and not length()


@functools.cache
def _warn_once(layer: str) -> None:
    warnings.warn(
        f"functx: {layer} is a region and a derivative is taken, so no cache of keys and values is "
        "used. Pass use_cache=False to silence this.",
        stacklevel=2,
    )
