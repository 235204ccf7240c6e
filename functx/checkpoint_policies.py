"""Policies: what a `functx.remat` region keeps beside its inputs.

All names of ``jax.checkpoint_policies``, with their meaning, and further ones by operator and by
size of the result. Every policy is a frozen, hashable value; ``a | b`` keeps what either keeps,
``a & b`` what both keep, ``~a`` what ``a`` does not.

A policy says what *may* be kept: a value that the pullback does not read is not, nor are random
numbers, nor what operations that write in place return. It is asked about the operation on one
example, so ``vmap`` does not change what is kept. ``policy=`` also takes a list of ATen operators,
and a function ``policy(ctx, op, *args, **kwargs)`` that returns a bool or a
``torch.utils.checkpoint.CheckpointPolicy``, as torch's selective checkpointing does.

Example:
    >>> import functx, torch
    >>> from functx import checkpoint_policies as cp
    >>> x = torch.ones(3, requires_grad=True)
    >>> f = lambda x: torch.sin(functx.checkpoint_name(torch.sin(x), "inner"))
    >>> y = functx.remat(f, policy=cp.save_only_these_names("inner"))(x)  # keeps x and sin(x)
    >>> cp.dots_saveable | cp.save_only_these_names("inner")
    dots_saveable | save_only_these_names('inner')

Source:
    ``jax.checkpoint_policies``; ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from functx._policies import Policy, save_these_operators
from functx._policies import policy as _policies
from functx._torch.compiler import OUTPUTS_KNOWN_TO_TORCH as _OUTPUTS_KNOWN

__all__ = [
    "Policy", "checkpoint_dots", "checkpoint_dots_with_no_batch_dims", "dots_saveable",
    "dots_with_no_batch_dims_saveable", "everything_saveable", "nothing_saveable", "offload",
    "offload_dot_with_no_batch_dims", "save_and_offload_only_these_names",
    "save_any_names_but_these", "save_anything_except_these_names", "save_at_least",
    "save_from_both_policies", "save_only_these_names", "save_smaller_than", "save_these_operators",
]  # fmt: skip

everything_saveable: Policy = _policies.Everything(True)
"""Keep every result that the pullback reads, as if there were no `remat`."""

nothing_saveable: Policy = _policies.Everything(False)
"""Keep inputs only, as without a policy."""

dots_saveable: Policy = _policies.OfOperation("dots_saveable", _policies.is_dot, True)
"""Keep results of matrix products, convolutions and fused attention."""

dots_with_no_batch_dims_saveable: Policy = _policies.OfOperation(
    "dots_with_no_batch_dims_saveable", _policies.is_dot, False
)
"""Keep results of matrix products that have no batch dimensions: of layers, not of attention."""

checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """As `dots_with_no_batch_dims_saveable`, from ``"device"`` to ``"pinned_host"`` memory."""
    return _offloaded(dots_with_no_batch_dims_saveable, offload_src, offload_dst)


def save_only_these_names(*names_which_can_be_saved: str) -> Policy:
    """Keep values that `functx.checkpoint_name` gave one of these names.

    A region whose values have names, none of which its policy lists, warns once.
    """
    return _policies.Names(_checked(names_which_can_be_saved))


def save_any_names_but_these(*names_not_to_save: str) -> Policy:
    """Keep values that have a name which is none of these."""
    return _policies.Names(_checked(names_not_to_save), others=True)


def save_anything_except_these_names(*names_not_to_save: str) -> Policy:
    """Keep every value, named or not, except those with one of these names."""
    return ~save_only_these_names(*names_not_to_save)


def save_from_both_policies(policy_1: Any, policy_2: Any) -> Policy:
    """Keep what either policy keeps: ``policy_1 | policy_2``."""
    return _policies.as_policy(policy_1) | policy_2


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Collection[str],
    names_which_can_be_offloaded: Collection[str],
    offload_src: str,
    offload_dst: str,
) -> Policy:
    """Keep values with these names: some where they are, others in host memory.

    Raises:
        ValueError: a name is in both collections.
    """
    saved, moved = map(_checked, (names_which_can_be_saved, names_which_can_be_offloaded))
    if saved & moved:
        raise ValueError(
            "save_and_offload_only_these_names: names are saved or offloaded, not both: "
            f"{sorted(saved & moved)}."
        )
    return _policies.Names(saved) | _offloaded(_policies.Names(moved), offload_src, offload_dst)


def save_smaller_than(nbytes: int) -> Policy:
    """Keep results of less than ``nbytes`` bytes (of one example)."""
    return _of_size(f"save_smaller_than({nbytes})", 0, nbytes)


def save_at_least(nbytes: int) -> Policy:
    """Keep results of ``nbytes`` bytes (of one example) and more."""
    return _of_size(f"save_at_least({nbytes})", nbytes, math.inf)


def offload(policy: Any) -> Policy:
    """Keep in host memory what ``policy`` keeps."""
    return _policies.Combined("offload", (_policies.as_policy(policy),))


def _offloaded(policy: Policy, source: str, destination: str) -> Policy:
    if (source, destination) != ("device", "pinned_host"):
        raise ValueError(
            f"checkpoint_policies: can't offload from {source!r} to {destination!r}; values go "
            "from 'device' to 'pinned_host'."
        )
    return offload(policy)


def _checked(names: Collection[Any]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"policy: expected a collection of names, got the string {names!r}.")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"checkpoint_policies: names are strings, one by one; got {name!r}.")
    return frozenset(names)


def _of_size(name: str, *bounds: float) -> Policy:
    return _policies.OfOperation(name, _policies.is_of_size, bounds, _OUTPUTS_KNOWN)
