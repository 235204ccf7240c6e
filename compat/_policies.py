"""Policies of functx as policies of ``jax.checkpoint``.

NOTE [names in JAX]
A name is an operation of its own in JAX, an identity; a policy is asked about each operation
before it is known whether a name will follow. So policies of operations do not look at names here
(the value was judged where it was computed), and those that need both, such as "everything except
these names", have no counterpart: they raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from functx._policies import Both, Either, Everything, Not
from functx._policy_kinds import Dots, Names, Offloaded

JaxPolicy = Callable[..., Any]


def jax_policy(policy: Any) -> JaxPolicy | None:
    """The policy of ``jax.checkpoint`` that means the same.

    Raises:
        TypeError: JAX has none.
    """
    if policy is None:
        return None
    translated = _translate(policy)
    if translated is None:
        raise TypeError(
            f"functx.remat: policy={policy!r} has no counterpart for JAX arrays. Of"
            " functx.checkpoint_policies, those that are in jax.checkpoint_policies too have one"
            " (but save_anything_except_these_names), what | makes of them, and what & and ~ make"
            " of those that know no names"
        )
    return translated


def _translate(policy: Any) -> JaxPolicy | None:
    policies = jax.checkpoint_policies
    match policy:
        case Everything(saved):
            return policies.everything_saveable if saved else policies.nothing_saveable
        case Dots(batch_dims=True, offload=None):
            return policies.dots_saveable
        case Dots(batch_dims=False, offload=None):
            return policies.dots_with_no_batch_dims_saveable
        case Dots(batch_dims=False, offload=(_, _) as places):
            return policies.offload_dot_with_no_batch_dims(*places)
        case Names():
            return _names(policy)
        case Offloaded(Dots(batch_dims=False, offload=None)):
            return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        case Offloaded(Names("only", names)):
            return _names(Names("only", frozenset(), names))
        case Either(first, second):
            return _combined(_translate(first), _translate(second), lambda a, b: a or b)
        case Both(first, second) if not (first.reads_names or second.reads_names):
            both = _combined(_translate(first), _translate(second), lambda a, b: a and b)
            return _of_operations(both)
        case Not(inner) if not policy.reads_names:
            translated = _translate(inner)
            return _of_operations(_combined(translated, translated, lambda a, _: not a))
    return None


def _names(policy: Names) -> JaxPolicy | None:
    policies = jax.checkpoint_policies
    if policy.rule == "except":
        return None  # NOTE [names in JAX]
    if policy.rule == "but":
        return policies.save_any_names_but_these(*policy.names)
    if not policy.offload:
        return policies.save_only_these_names(*policy.names)
    source, destination = policy.places
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sorted(policy.names),
        names_which_can_be_offloaded=sorted(policy.offload),
        offload_src=source,
        offload_dst=destination,
    )


def _combined(
    first: JaxPolicy | None, second: JaxPolicy | None, rule: Callable[[Any, Any], Any]
) -> JaxPolicy | None:
    if first is None or second is None:
        return None

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        said = (p(primitive, *avals, **params) for p in (first, second))
        # An answer is true if the value is kept: JAX's "recompute" is an object, too.
        return rule(*(type(x).__name__ != "RecomputeType" and x for x in said))

    return policy


def _of_operations(policy: JaxPolicy | None) -> JaxPolicy | None:
    if policy is None:
        return None
    return lambda primitive, *avals, **params: (
        primitive.name != "name" and policy(primitive, *avals, **params)
    )
