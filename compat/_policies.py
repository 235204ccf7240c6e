"""Policies of functx as policies of ``jax.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def jax_policy(policy: Any) -> Callable[..., Any] | None:
    """The policy of ``jax.checkpoint`` that means the same.

    Raises:
        TypeError: JAX has none.
    """
    if policy is None:
        return None
    raise TypeError(
        f"functx.remat: policy={policy!r} has no counterpart for JAX arrays; use a policy of"
        " jax.checkpoint_policies with jax.checkpoint"
    )
