"""What Hugging Face transformers does beside calling layers: it records their outputs, and caches.

NOTE [recorded outputs]
With ``output_router_logits=True`` and the like, hooks append what some submodule computed to lists
of the model's call. Tensors that a region makes may leave it by return only, so a region runs with
lists of its own, returns what was appended to them, and appends that to the model's.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from functx._remat import _function
from functx._remat._options import Options

_CACHES = ("past_key_values", "past_key_value", "layer_past")


def run(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """``f(*args, **kwargs)`` as a region. ``NOTE [recorded outputs]``."""
    collector = None if torch.compiler.is_compiling() else _collector()
    collected = None if collector is None else collector.get()
    if collected is None:
        return _function.run(f, args, kwargs, options)
    before = {k: len(v) if isinstance(v, list) else v for k, v in collected.items()}
    body = functools.partial(_with_own_lists, collector, before, f)
    result, appended = _function.run(body, args, kwargs, options)
    for key, outputs in appended.items():
        collected[key].extend(outputs)
    return result


def _collector() -> Any:
    """Where transformers keeps the lists of the call under way, if it is loaded and does."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)


def _with_own_lists(
    collector: Any, before: dict[str, Any], f: Any, /, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, list[Any]]]:
    own = {k: [None] * n if _is_count(n) else n for k, n in before.items()}
    token = collector.set(own)
    try:
        result = f(*args, **kwargs)
    finally:
        collector.reset(token)
    return result, {k: own[k][n:] for k, n in before.items() if _is_count(n)}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def without_cache(
    module: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As transformers does in a checkpointed layer: what a cache keeps, a region would keep too.

    A cache that holds something is left: the layer reads it (a prefix that is trained, the states
    of a prompt).

    Args:
        module: the layer.
        names: of its positional parameters.
        args: positional arguments.
        kwargs: the others.
    """
    given = dict(zip(names, args)) | kwargs
    dropped: dict[str, Any] = {"use_cache": False} if given.get("use_cache") is True else {}
    if not getattr(module, "_can_checkpoint_with_cache", False):
        caches = {name: given[name] for name in _CACHES if given.get(name) is not None}
        if not all(map(_is_empty, caches.values())):
            return args, kwargs
        dropped |= dict.fromkeys(caches)
    if not dropped:
        return args, kwargs
    _warn_once(type(module).__name__)
    args = (*(dropped.get(name, a) for name, a in zip(names, args)), *args[len(names) :])
    return args, kwargs | {k: v for k, v in dropped.items() if k in kwargs}


def _is_empty(cache: Any) -> bool:
    length = getattr(cache, "get_seq_length", None)
    return length is not None and not length()


def positional(forward: Any) -> list[str]:
    """The names of positional parameters."""
    return [
        p.name
        for p in inspect.signature(forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


@functools.cache
def _warn_once(layer: str) -> None:
    warnings.warn(
        f"functx: {layer} is a region and a derivative is taken, so no cache of keys and values is "
        "used. Pass use_cache=False to silence this.",
        stacklevel=2,
    )
