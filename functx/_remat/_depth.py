"""How deep regions are nested: an error that says so, where Python's stack is not enough."""

from __future__ import annotations

import sys
import threading

from functx._errors import RematError

_FEW = 8
"""Nested no deeper than this, whatever recurses too deep is the body itself."""


class _Nesting(threading.local):
    depth = 0
    deepest = 0


_nesting = _Nesting()


def is_nested() -> bool:
    """Whether a region is running on this thread."""
    return _nesting.depth > 0


class nested:
    """The enclosed code is the run of a region, or its replay.

    Raises:
        functx.RematError: from the outermost region, where the stack was too small for all of them.
    """

    __slots__ = ("_of",)

    def __init__(self, of: str) -> None:
        self._of = of

    def __enter__(self) -> None:
        depth = _nesting.depth = _nesting.depth + 1
        if depth > _nesting.deepest:
            _nesting.deepest = depth

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        depth = _nesting.depth = _nesting.depth - 1
        if depth:
            return
        deepest, _nesting.deepest = _nesting.deepest, 0
        if kind is not None and issubclass(kind, RecursionError) and deepest > _FEW:
            raise RematError(
                f"remat: in {self._of!r} regions are nested {deepest} deep, which takes more of "
                f"Python's stack than there is (sys.getrecursionlimit() is "
                f"{sys.getrecursionlimit()}). Nest them as a tree, whose depth is the logarithm of "
                "its length (functx.remat_sequential and the loops do), or raise the limit."
            ) from None
