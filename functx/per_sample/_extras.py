"""What a call can return besides its result."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Extras(NamedTuple):
    """What was asked for besides the result; ``None`` for the rest.

    Attributes:
        values: The losses, of shape ``(B,)``.
        norms: The norms of the gradients, of shape ``(B,)``; with groups a pytree of such.
        aux: The auxiliary outputs, a pytree of tensors of shape ``(B, ...)``.
    """

    values: torch.Tensor | None = None
    norms: Any = None
    aux: Any = None


def returned(result: Any, has_aux: bool, asked: bool, extras: Extras) -> Any:
    """``result``; with ``has_aux`` alone ``(result, aux)``; with more ``(result, extras)``."""
    if asked:
        return result, extras
    return (result, extras.aux) if has_aux else result
