"""The second of two passes: an ordinary backward pass of the weighted sum of the losses.

The sum of weighted gradients is the gradient of the weighted sum, and that takes no gradient of any
one example. It needs the losses a second time, so they have to be what they were: random numbers
are not allowed, and the values are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from functx import _torch, _tree, memory
from functx.per_sample._batch import Batch
from functx.per_sample._pull import Loss

# Two passes where gradients of an example take this many times the bytes of its activations: the
# second pass, which works on activations, is then next to nothing beside the first.
_WORTH = 8
_SMALL = 2**25  # bytes of gradients about which nobody would measure anything


def possible(loss: Loss, batch: Batch) -> bool:
    """Whether the losses can be run a second time, all examples together."""
    shared = all(dim is None for dim in batch.dims_of(loss.positions))
    return shared and loss.randomness == "error" and not _torch.transforming()


def worth(loss: Loss, batch: Batch, gradients: int) -> bool:
    """Whether two passes are the better way.

    Args:
        loss: The loss of one example.
        batch: The examples.
        gradients: Bytes of the gradients of one example, of all leaves.
    """
    if batch.size * gradients < _SMALL:
        return False
    held: list[Any] = []

    def kept(size: int) -> int:
        few = batch.chunk(0, size)
        return memory.profile(lambda: held.append(_recorded(loss, few))).kept

    return gradients > _WORTH * (kept(2) - kept(1))


def add_up(
    loss: Loss,
    batch: Batch,
    values: torch.Tensor,
    weights: Sequence[torch.Tensor],
    of_leaf: Sequence[int],
) -> dict[int, torch.Tensor]:
    """Sums of weighted gradients, by leaf.

    Args:
        loss: The loss of one example.
        batch: The examples.
        values: Their losses, as the first pass found them.
        weights: The factors of the examples, of shape ``(c,)``, a tensor for each group.
        of_leaf: The groups of the leaves that are asked for, by leaf; -1 for the others.

    Raises:
        RuntimeError: The losses are not what they were.
    """
    found: dict[int, torch.Tensor] = {}
    again, pullback = _recorded(loss, batch)
    if not torch.allclose(again, values, rtol=1e-3, atol=1e-6, equal_nan=True):
        raise RuntimeError(
            f"{loss.api}: the loss gave other values when it ran a second time: it depends on "
            "something that changes between calls; use passes=1"
        )
    asked = sorted(set(of_leaf) - {-1})
    for group in asked:
        # Of the others no gradient is computed.
        receivers = {
            leaf: functools.partial(found.__setitem__, leaf)
            for leaf, own in enumerate(of_leaf)
            if own == group
        }
        pullback.feed(weights[group].to(again.dtype), receivers, group != asked[-1])
    return found


def _recorded(loss: Loss, batch: Batch) -> tuple[torch.Tensor, Any]:
    """The losses of all examples, and their pullback to the differentiated arguments."""

    def value_of(*args: Any, **kwargs: Any) -> Any:
        value = loss.func(*args, **kwargs)
        return value[0] if loss.has_aux else value

    def values_of(*args: Any) -> torch.Tensor:
        found: torch.Tensor = replace(batch, leaves=_tree.leaves(args)).map(value_of, "error")
        return found

    value, _, pullback = loss.record(values_of, batch.args(), {}, has_aux=False, scalar=False)
    return value, pullback
