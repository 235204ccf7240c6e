"""Groups of leaves that share a norm, their thresholds, and the factor for a norm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from functx._core import describe, tree

Scaling = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class Groups:
    """The differentiated leaves, in groups with one norm each."""

    of_leaf: list[int]  # for each leaf, the number of its group
    thresholds: list[Any]  # one for each group
    pack: Callable[[list[Any]], Any]  # makes the user's structure from one entry per group


def groups_of(differentiated: Any, groups: Any, max_norm: Any, api: str) -> Groups:
    """The groups for the options ``groups`` and ``max_norm``.

    ``groups`` is a pytree prefix of the differentiated arguments, with labels as leaves; leaves
    with equal labels form a group. Without ``groups``, each leaf of ``max_norm``, also a pytree
    prefix, is a group.

    Raises:
        ValueError: The option is not a prefix of ``differentiated``, or thresholds are not positive
            numbers.
    """
    pack: Callable[[list[Any]], Any]
    try:
        if groups is not None:
            labels = tree.broadcast_prefix(groups, differentiated)
            names = list(dict.fromkeys(labels))
            if bad := [*filter(callable, names)]:
                raise TypeError(f"{api}: groups must be a pytree of labels, got {describe(bad[0])}")
            of_leaf = [names.index(label) for label in labels]
            pack, thresholds = lambda each: dict(zip(names, each)), [max_norm] * len(names)
        else:
            thresholds, spec = tree.flatten(max_norm)
            of_leaf = tree.broadcast_prefix_numbers(max_norm, differentiated)
            pack = functools.partial(tree.unflatten, spec)
    except ValueError as error:
        name = "max_norm" if groups is None else "groups"
        raise ValueError(
            f"{api}: {name} must be a pytree prefix of the differentiated arguments: "
            f"{str(error)[:300]}"
        ) from None
    if groups is not None and not (max_norm is None or _is_number(max_norm)):
        if not isinstance(max_norm, Mapping) or set(max_norm) != set(names):
            raise ValueError(
                f"{api}: max_norm must be a number, or a dict with a number for each group, "
                f"{pack(['...'] * len(names))}; got {describe(max_norm)}"
            )
        thresholds = [max_norm[name] for name in names]
    for threshold in thresholds:
        few = isinstance(threshold, (int, float)) and not threshold > 0
        if few or (threshold is not None and not _is_number(threshold)):
            raise ValueError(f"{api}: max_norm must be positive numbers, got {describe(threshold)}")
    return Groups(of_leaf, thresholds, pack)


def clip(norm: torch.Tensor, max_norm: Any) -> torch.Tensor:
    """Scale down to a norm of at most ``max_norm``: ``min(1, max_norm / norm)``.

    Abadi et al., Deep learning with differential privacy, 2016.

    Takes the norms of per-example gradients, of shape ``(B,)``, and returns a factor for each.
    """
    above_zero = norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return torch.where(norm > max_norm, max_norm / above_zero, 1.0).to(norm.dtype)


def automatic(gamma: float = 0.01) -> Scaling:
    """Scale every gradient to a norm just below ``max_norm``: ``max_norm / (norm + gamma)``.

    This is AUTO-S of Bu et al., Automatic clipping, 2023. There is no threshold to tune:
    ``max_norm`` (1 by default) only scales the sum.

    Args:
        gamma: A positive number, which keeps small gradients small.

    Returns:
        A function of norms and a threshold, for ``scaling=``.

    Raises:
        ValueError: ``gamma`` is not positive.
    """
    if not gamma > 0:
        raise ValueError(f"per_sample.automatic: gamma must be positive, got {gamma}")

    def factor(norm: torch.Tensor, max_norm: Any) -> torch.Tensor:
        return (1.0 if max_norm is None else max_norm) / (norm + gamma)

    return factor


def normalize(norm: torch.Tensor, max_norm: Any = None) -> torch.Tensor:
    """Scale every gradient to the norm ``max_norm`` (1 by default); zero stays zero.

    Takes the norms of per-example gradients, of shape ``(B,)``, and returns a factor for each.
    """
    return (1.0 if max_norm is None else max_norm) / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def check_scaling(scaling: Any, max_norm: Any, api: str) -> Scaling:
    """The scaling function for a name or a function."""
    named = {"clip": clip, "automatic": automatic(), "normalize": normalize}
    if isinstance(scaling, str):
        if scaling not in named:
            raise ValueError(f"{api}: scaling must be one of {sorted(named)}, got {scaling!r}")
        if scaling == "clip" and max_norm is None:
            raise ValueError(f"{api}: scaling='clip' needs max_norm, the norm to clip to")
        return named[scaling]
    if not callable(scaling):
        raise TypeError(
            f"{api}: scaling must be a name or a function (norm, max_norm) -> factor, got "
            f"{describe(scaling)}"
        )
    return scaling


def factors(scaling: Scaling, norm: torch.Tensor, max_norm: Any, api: str) -> torch.Tensor:
    """The factors of ``scaling`` for the norms of one group; their shape is checked."""
    factor = scaling(norm, max_norm)
    if not isinstance(factor, torch.Tensor) or factor.shape != norm.shape:
        raise ValueError(
            f"{api}: scaling must return a factor for each norm, a tensor of shape "
            f"{tuple(norm.shape)}, got {describe(factor)}"
        )
    return factor


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)
