"""``vmap`` over examples, as torch's; with its batching rules mended where that can matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from functx import _torch
from functx._padding import read_no_masks
from functx._torch_norms import mend_batching_rules


def vmap(func: Callable[..., Any], in_dims: Any, randomness: str) -> Callable[..., Any]:
    """`torch.func.vmap`.

    Args:
        func: The function of one example.
        in_dims: As there.
        randomness: As there.
    """
    # Where nobody can differentiate the result, torch's rules are right, and quicker.
    if torch.is_grad_enabled() or _torch.transforming() or _torch.forward_ad_level() >= 0:
        mend_batching_rules()
    read_no_masks()
    return torch.func.vmap(func, in_dims=in_dims, randomness=randomness)
