"""`torch.cond` in a region: the branch that is chosen runs as by an ``if``, seen by the region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _tree
from functx._remat._tapes import batched

COND: Any = torch.ops.higher_order.cond


def branch(
    pred: Tensor, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    """What the branch gives that ``pred`` chooses; where examples choose, both run."""
    if not batched(pred):
        return (true_fn if pred else false_fn)(*operands)
    chosen, spec = _tree.flatten(true_fn(*operands))
    others = _tree.leaves(false_fn(*operands))
    return _tree.unflatten(spec, [torch.where(pred, a, b) for a, b in zip(chosen, others)])
