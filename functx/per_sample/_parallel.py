"""Sums over data-parallel ranks: every leaf in one buffer, one all-reduce."""

from __future__ import annotations

from typing import Any

import torch

from functx import _tree


def all_reduced(tree: Any, process_group: Any) -> Any:
    """The sum of a pytree of tensors over the ranks of a group.

    Args:
        tree: Tensors, of the same shapes on every rank.
        process_group: A group of :mod:`torch.distributed`, or a ``DeviceMesh`` of one dimension;
            ``True`` for the default group; ``None`` for no sum at all.

    Returns:
        The pytree, equal on every rank.

    Raises:
        RuntimeError: There is no process group.
    """
    if process_group is None or process_group is False:
        return tree
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "per_sample: process_group was given, but torch.distributed has no process group; call "
            "torch.distributed.init_process_group first"
        )
    group: Any = None if process_group is True else process_group
    if hasattr(group, "get_group"):  # a DeviceMesh of one dimension
        group = group.get_group()
    leaves, spec = _tree.flatten(tree)
    reduced: dict[int, torch.Tensor] = {}
    for device in dict.fromkeys(leaf.device for leaf in leaves):
        numbers = [i for i, leaf in enumerate(leaves) if leaf.device == device]
        # `cat` makes of several dtypes the one that holds all of them.
        buffer = torch.cat([leaves[i].detach().reshape(-1) for i in numbers])
        dist.all_reduce(buffer, group=group)
        parts = buffer.split([leaves[i].numel() for i in numbers])
        for i, part in zip(numbers, parts):
            of_dtype = part.real if buffer.is_complex() and not leaves[i].is_complex() else part
            reduced[i] = of_dtype.view(leaves[i].shape).to(leaves[i].dtype)
    return _tree.unflatten(spec, [reduced[i] for i in range(len(leaves))])
