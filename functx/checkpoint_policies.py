"""Policies: which values a `functx.remat` region saves in addition to its inputs.

This module has all names of ``jax.checkpoint_policies``, with the same meaning, and further
policies that decide by operator and by the size of the result. Every policy is a frozen, hashable
value. ``a | b`` saves what either policy saves, ``a & b`` what both save, and ``~a`` what ``a``
does not save.

A policy decides what *may* be saved. Never saved are values that the pullback does not read, random
numbers, and the results of operations that write in place. A policy sees the operation on one
example, so ``vmap`` does not change what is saved. ``policy=`` also takes a list of ATen operators,
or a function ``policy(ctx, op, *args, **kwargs)`` that returns a bool or a
``torch.utils.checkpoint.CheckpointPolicy``, as in torch's selective checkpointing.

Example:
    >>> import functx, torch
    >>> from functx import checkpoint_policies as cp
    >>> x = torch.ones(3, requires_grad=True)
    >>> f = lambda x: torch.sin(functx.checkpoint_name(torch.sin(x), "inner"))
    >>> y = functx.remat(f, policy=cp.save_only_these_names("inner"))(x)  # saves x and sin(x)
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
"""Save every result that the pullback reads, as if there were no `remat`."""

nothing_saveable: Policy = _policies.Everything(False)
"""Save only the inputs. This is the default."""

dots_saveable: Policy = _policies.OfOperation("dots_saveable", _policies.is_dot, True)
"""Save the results of matrix products, convolutions and fused attention."""

dots_with_no_batch_dims_saveable: Policy = _policies.OfOperation(
    "dots_with_no_batch_dims_saveable", _policies.is_dot, False
)
"""Save the results of matrix products without batch dimensions: those of layers, not attention."""

checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """Like `dots_with_no_batch_dims_saveable`, but in ``"pinned_host"`` memory."""
    return _offloaded(dots_with_no_batch_dims_saveable, offload_src, offload_dst)


def save_only_these_names(*names_which_can_be_saved: str) -> Policy:
    """Save values that `functx.checkpoint_name` gave one of these names.

    A region warns once if its values have names and the policy lists none of these.
    """
    return _policies.Names(_checked(names_which_can_be_saved))


def save_any_names_but_these(*names_not_to_save: str) -> Policy:
    """Save values that have a name other than these."""
    return _policies.Names(_checked(names_not_to_save), others=True)


def save_anything_except_these_names(*names_not_to_save: str) -> Policy:
    """Save every value, with or without a name, except those with one of these names."""
    return ~save_only_these_names(*names_not_to_save)


def save_from_both_policies(policy_1: Any, policy_2: Any) -> Policy:
    """Save what either policy saves: ``policy_1 | policy_2``."""
    return _policies.as_policy(policy_1) | policy_2


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Collection[str],
    names_which_can_be_offloaded: Collection[str],
    offload_src: str,
    offload_dst: str,
) -> Policy:
    """Save values with these names: some on their device, others in host memory.

    Raises:
        ValueError: a name is in both collections.
    """
    saved, moved = map(_checked, (names_which_can_be_saved, names_which_can_be_offloaded))
    if saved & moved:
        raise ValueError(
            "save_and_offload_only_these_names: a name can be saved or offloaded, not both: "
            f"{sorted(saved & moved)}."
        )
    return _policies.Names(saved) | _offloaded(_policies.Names(moved), offload_src, offload_dst)


def save_smaller_than(nbytes: int) -> Policy:
    """Save results of less than ``nbytes`` bytes (for one example)."""
    return _of_size(f"save_smaller_than({nbytes})", 0, nbytes)


def save_at_least(nbytes: int) -> Policy:
    """Save results of ``nbytes`` bytes or more (for one example)."""
    return _of_size(f"save_at_least({nbytes})", nbytes, math.inf)


def offload(policy: Any) -> Policy:
    """Save in host memory what ``policy`` saves."""
    return _policies.Combined("offload", (_policies.as_policy(policy),))


def _offloaded(policy: Policy, source: str, destination: str) -> Policy:
    if (source, destination) != ("device", "pinned_host"):
        raise ValueError(
            f"checkpoint_policies: can't offload from {source!r} to {destination!r}; the only "
            "choice is from 'device' to 'pinned_host'."
        )
    return offload(policy)


def _checked(names: Collection[Any]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"policy: expected a collection of names, got the string {names!r}.")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"checkpoint_policies: each argument must be a name (a string), got {name!r}."
            )
    return frozenset(names)


def _of_size(name: str, *bounds: float) -> Policy:
    return _policies.OfOperation(name, _policies.is_of_size, bounds, _OUTPUTS_KNOWN)
