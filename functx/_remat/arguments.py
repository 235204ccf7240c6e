"""Errors for arguments that a region can't support, or that it has changed (rule 4)."""

from __future__ import annotations

from functools import partial
from operator import is_
from typing import Any

from functx._core import RematError, tree


def check(args: Any, kwargs: Any, name: str) -> None:
    """Refuse key-value caches: a replay would read them as the forward has left them."""
    for a in (*args, *kwargs.values()):
        if _is_cache(type(a)):
            said = f"remat: {name} fills a key-value cache, {type(a).__name__}; a replay would find"
            if a.get_seq_length():
                raise RematError(
                    f"{said} more in it. It holds something already: the keys and values of a "
                    "prompt, or the prefix that prefix tuning trains, which use_cache=False would "
                    "drop. Make regions of parts that do not see the cache, such as the MLPs: "
                    "functx.apply_remat(model, '**.mlp')."
                )
            raise RematError(
                f"{said} it full. Call the model with use_cache=False, as functx.apply_remat and "
                "functx.patch_checkpoint do."
            )


def _is_cache(kind: type) -> bool:
    try:
        return hasattr(kind, "get_seq_length") and hasattr(kind, "update")
    except Exception:  # ``__getattr__`` of a metaclass may raise any error
        return False


def called(f: Any, args: Any, kwargs: Any, name: str, kind: Any = RematError) -> Any:
    """Call ``f(*args, **kwargs)``; an error if it changes a container and does not return it."""
    given = [(a, *tree.flatten(a)) for a in (*args, *kwargs.values()) if tree.is_node(a)]
    result = f(*args, **kwargs)
    for container, leaves, spec in given:
        now, spec_now = tree.flatten(container)
        new = {id(a) for a, b in zip(now, leaves) if a is not b}
        if spec_now == spec and (not new or new <= {*map(id, tree.leaves(result))}):
            continue
        is_it = partial(is_, container)
        if not any(map(is_it, tree.flatten(result, is_it)[0])):
            raise kind(
                f"{name} changes an argument, a {type(container).__name__}, and does not "
                "return it, so the caller would not see the change. Return the changed container, "
                "or return the new values."
            )
    return result
