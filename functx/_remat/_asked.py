"""What of that which tapes hold is read for the gradients of some inputs alone.

NOTE [asked for]
A backward pass that asks for the gradients of some inputs (`torch.autograd.grad`), or a tape of one
level where the body ran on those of several, runs only nodes that lead to these inputs. What the
others saved is dead. The tape of the forward is gone by then; but a node that leads to an input is
one of an operation that computes from it, and what a node saved its operation read or made. So the
record tells: what is computed from the inputs, operation by operation of the body (which may be
several ATen operations: a node belongs to all of them). Where the pullback is itself recorded, what
was computed from does count as well, since derivatives flow through what it reads.

Of some operations it is known what is saved for whom: factors, each for the gradient of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from functx._remat._step import Step
from functx._torch_operators import softmax_backward

_aten = torch.ops.aten
FACTORS = {
    *(_aten.mul.Tensor, _aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default),
    *(_aten.addmm.default, _aten.baddbmm.default, _aten.convolution.default),
}
"""Operations whose nodes read what they were given for the gradients of the others alone."""

UNREAD = {
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.neg.default, _aten.sum.default),
    *(_aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.cat.default),
}
"""Operations whose nodes read neither what they were given nor what they gave."""

RESULT_UNREAD = {
    *(*FACTORS, *UNREAD),
    *(_aten.sin.default, _aten.cos.default, _aten.log.default, _aten.pow.Tensor_Scalar),
    *(_aten.abs.default, _aten.gelu.default, _aten.silu.default, _aten.softplus.default),
    *(_aten.tanh_backward.default, _aten.sigmoid_backward.default, _aten.gelu_backward.default),
    *(softmax_backward, _aten.silu_backward.default),
}
"""Operations whose nodes do not read what they gave."""


class Asked(NamedTuple):
    """What a replay is for.

    Attributes:
        inputs: whose gradients are asked for, by position.
        recorded: whether the pullback is recorded.
        plainly: whether each ATen operation has nodes of its own, as nothing is mapped.
    """

    inputs: tuple[int, ...]
    recorded: bool
    plainly: bool


def read_for(
    asked: Asked, storages: Collection[int], steps: Sequence[Step], live: Collection[int]
) -> set[int]:
    """Which results of steps nodes read that lead to some inputs. ``NOTE [asked for]``.

    Args:
        asked: what is asked for.
        storages: the memory of the inputs.
        steps: what ran, in order.
        live: keys of the results that tapes hold.
    """
    units = range(len(steps)) if asked.plainly else [step.part_of for step in steps]
    dependent = _dependent(storages, steps, units)

    def depends(key: int) -> bool:
        return units[key >> 6] in dependent

    def is_of(number: int, kinds: Collection[Any]) -> bool:
        return asked.plainly and steps[number].kind.func in kinds

    readers = _readers(steps)
    found = set()
    for key in live:
        read = depends(key) and not is_of(key >> 6, RESULT_UNREAD)
        for number in () if read else readers.get(key, ()):
            read = units[number] in dependent and not is_of(number, UNREAD)
            if read and is_of(number, FACTORS):
                others = [*steps[number].reads]
                others.remove(key)
                read = any(map(depends, others)) or any(
                    storage in storages for storage in steps[number].externals
                )
            if read:
                break
        if read:
            found.add(key)
    if not asked.recorded:
        return found
    before = {units[number] for number in _ancestors(found, steps, units)}
    return {
        key
        for key in live
        if key in found
        or units[key >> 6] in before
        or any(units[number] in before for number in readers.get(key, ()))
    }


def _dependent(storages: Collection[int], steps: Sequence[Step], units: Sequence[Any]) -> set[Any]:
    """The operations that compute from what is in some memory."""
    found: set[Any] = set()
    size = -1
    while size != len(found):  # the parts of an operation may lie apart
        size = len(found)
        for step, unit in zip(steps, units):
            if unit not in found and (
                any(units[key >> 6] in found for key in step.reads)
                or any(storage in storages for storage in step.externals)
            ):
                found.add(unit)
    return found


def _readers(steps: Sequence[Step]) -> Mapping[int, list[int]]:
    """By key, the steps that read it."""
    readers: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        for key in step.reads:
            readers.setdefault(key, []).append(number)
    return readers


def _ancestors(keys: Collection[int], steps: Sequence[Step], units: Sequence[Any]) -> set[int]:
    """The steps that some results come from, with all that are part of the same operations."""
    parts: dict[Any, list[int]] = {}
    for number, unit in enumerate(units):
        parts.setdefault(unit, []).append(number)
    stack, found = [key >> 6 for key in keys], set[int]()
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            stack += parts[units[number]]
            stack += [key >> 6 for key in steps[number].reads]
    return found
