"""``static_argnums`` and ``static_argnames``, checked as JAX checks them.

An argument that is no tensor is static here in any case. Declared ones must be no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Static = tuple[tuple[int, ...], tuple[str, ...]]


def checked_static(nums: int | Sequence[int], names: str | Sequence[str]) -> Static | None:
    """Positions and names, or ``None`` if there are none.

    Raises:
        TypeError: something is no int, or no string.
    """
    nums = (nums,) if type(nums) is int else nums
    names = (names,) if isinstance(names, str) else names
    if not isinstance(nums, Sequence) or not all(type(n) is int for n in nums):
        raise TypeError(
            f"remat: static_argnums must be an int or a sequence of ints, got {nums!r}."
        )
    if not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"remat: static_argnames must be a string or a sequence of strings, got {names!r}."
        )
    return (tuple(nums), tuple(names)) if nums or names else None


def check_static(static: Static, args: Any, kwargs: Any) -> None:
    """Check a call.

    Raises:
        ValueError: a position is out of range.
        TypeError: a static argument is a tensor.
    """
    nums, names = static
    for n in nums:
        if not -len(args) <= n < len(args):
            raise ValueError(
                f"remat: static_argnums has {n}, which is out of range for {len(args)} positional "
                "arguments."
            )
    given = [args[n] for n in nums] + [kwargs[n] for n in names if n in kwargs]
    for a in given:
        if isinstance(a, Tensor):
            raise TypeError("remat: a static argument is a tensor, which can't be static.")
