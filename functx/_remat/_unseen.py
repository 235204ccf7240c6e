"""Tensors that a body used where functx can't see it."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from functx._errors import RematError


def refuse_unseen(region: str, t: Tensor) -> NoReturn:
    """Raise: the tape of a region reaches a tensor no mode saw (one that an extension used, say).

    Args:
        region: its name.
        t: what the tape ends in.
    """
    raise RematError(
        f"remat: the region {region!r} used a tensor of shape {tuple(t.shape)} that requires grad "
        "where functx can't see it (in another thread, or in an extension that is called past "
        "torch's Python API), so its gradient would be lost. Pass it to the region as an argument."
    )
