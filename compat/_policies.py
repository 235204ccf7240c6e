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

from functx import checkpoint_policies as ours
from functx._save_policies import Combined, Everything, Names

JaxPolicy = Callable[..., Any]

_NAME = "name"  # what the primitive of a name is called


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
        case ours.dots_saveable:
            return policies.dots_saveable
        case ours.dots_with_no_batch_dims_saveable:
            return policies.dots_with_no_batch_dims_saveable
        case Everything(saved):
            return policies.everything_saveable if saved else policies.nothing_saveable
        case Names(names, others=True):
            return policies.save_any_names_but_these(*names)
        case Names(names):
            return policies.save_only_these_names(*names)
        case Combined("offload", (ours.dots_with_no_batch_dims_saveable,)):
            return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        case Combined("offload", (Names(names, others=False),)):
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=sorted(names),
                offload_src="device",
                offload_dst="pinned_host",
            )
        case Combined("|", (first, second)):
            return _combined(_translate(first), _translate(second), lambda a, b: a or b)
        case Combined("&", (first, second)) if not policy.reads_names:
            both = _combined(_translate(first), _translate(second), lambda a, b: a and b)
            return _of_operations(both)
        case Combined("~", (inner,)) if not policy.reads_names:  # NOTE [names in JAX]
            translated = _translate(inner)
            return _of_operations(_combined(translated, translated, lambda a, _: not a))
    return None


def _combined(
    first: JaxPolicy | None, second: JaxPolicy | None, rule: Callable[[Any, Any], Any]
) -> JaxPolicy | None:
    if first is None or second is None:
        return None

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        return rule(
            _answer(first(primitive, *avals, **params)),
            _answer(second(primitive, *avals, **params)),
        )

    return policy


def _answer(said: Any) -> Any:
    """An answer that is true if the value is kept: JAX's "recompute" is an object, too."""
    return False if type(said).__name__ == "RecomputeType" else said


def _of_operations(policy: JaxPolicy | None) -> JaxPolicy | None:
    if policy is None:
        return None
    return lambda primitive, *avals, **params: (
        primitive.name != _NAME and policy(primitive, *avals, **params)
    )
