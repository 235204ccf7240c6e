"""Regions in a traced graph: inlined by default, or kept as call nodes for the JAX lowering."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functx._remat._region import Flat, Region


class _Keeping(threading.local):
    depth = 0


_keeping = _Keeping()


@contextmanager
def keep_regions() -> Iterator[None]:
    """While a graph is traced on this thread, leave each region in it as one call node.

    The node's target is :data:`remat_region`, its arguments are a submodule and the region's
    inputs (captures and constants among them), its result a tuple;
    ``node.meta["functx_region"]`` is a `RegionInfo`.
    """
    _keeping.depth += 1
    try:
        yield
    finally:
        _keeping.depth -= 1


def keeping() -> bool:
    """Whether regions are to be kept in a graph."""
    return _keeping.depth > 0


@dataclass(frozen=True)
class RegionInfo:
    """What a kept region is.

    Attributes:
        name: of the function.
        policy: what to save, ``None`` for nothing.
        replay: whether it is the pullback of a region: its forward part is a recompute that a
            compiler must not merge with the forward.
    """

    name: str
    policy: Any
    replay: bool


def emit(fn: Flat, inputs: Sequence[Tensor], region: Region) -> list[Tensor | None]:
    """Trace the region into a submodule and call it by one node."""
    raise NotImplementedError
