"""Arguments of a call that a region can't have, or has changed (rule 4)."""

from __future__ import annotations

from typing import Any

from functx import _tree
from functx._errors import RematError


def check(args: Any, kwargs: Any, name: str) -> None:
    """Refuse what a replay would read as the forward left it.

    Raises:
        RematError: an argument is a key-value cache.
    """
    for a in (*args, *kwargs.values()):
        if hasattr(type(a), "get_seq_length") and hasattr(type(a), "update"):
            raise RematError(
                f"remat: {name} is given a key-value cache, {type(a).__name__}, which it fills; a "
                "replay would find it full. Call the model with use_cache=False; "
                "functx.apply_remat and functx.patch_checkpoint do that."
            )


class Containers:
    """The containers among the arguments of a forward: copies, whose structure is compared.

    A region may fill a dict and return it. What it changes and does not return would be lost.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        self._given = [a for a in given if _tree.is_node(a)]
        self._before = [_tree.flatten(a) for a in self._given]

    def check(self, result: Any, name: str) -> None:
        """Compare them with what they were.

        Raises:
            RematError: one has changed, and is no part of the result.
        """
        for container, (leaves, spec) in zip(self._given, self._before):
            now, spec_now = _tree.flatten(container)
            same = spec_now == spec and all(a is b for a, b in zip(now, leaves))
            if not same and not _holds(result, container):
                raise RematError(
                    f"remat: {name} changes an argument, a {type(container).__name__}, and does "
                    "not return it; the caller would not see the change. Return it, or what it was "
                    "given."
                )


def _holds(tree: Any, container: Any) -> bool:
    found = []
    _tree.flatten(tree, lambda x: found.append(x is container) or x is container)
    return any(found)
