"""Loops over JAX arrays that save a few of their carries: nested scans with ``jax.checkpoint``.

NOTE [loops in JAX]
With the schedule of regions that is used in torch, the program would be as long as the loop. Nested
scans make a program of fixed length. There are ``depth`` scans, each with about
``steps ** (1 / depth)`` checkpointed bodies; the innermost body is one step. While a step is pulled
back, each level holds its carries, the first of which is also a carry of the next outer level.
Every step runs again once for each level. So the depth is the smallest that the slots allow.

What could be improved: nested scans need more slots than the schedule in torch does for the same
number of repeated steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[[Any, Any], tuple[Any, Any]]


def scan(
    body: Step, carry: Any, xs: Any, length: int | None, reverse: bool, slots: int | None
) -> tuple[Any, Any]:
    """``functx.remat_scan``. NOTE [loops in JAX].

    Raises:
        ValueError: if there are fewer slots than nested scans need. Other errors are those of
            ``jax.lax.scan``.
    """
    sizes = {jnp.shape(x)[0] for x in jax.tree.leaves(xs) if jnp.ndim(x)}
    if length is None and len(sizes) == 1:
        (length,) = sizes
    if length is None or sizes - {length} or any(not jnp.ndim(x) for x in jax.tree.leaves(xs)):
        return lax.scan(body, carry, xs, length, reverse)  # it raises the error
    depth = _depth("remat_scan", length, slots)
    return _advance(body, carry, xs, length, reverse, depth, _branches(length, depth))


def loop(
    body: Callable[[Any], Any],
    state: Any,
    steps: int | None,
    cond: Callable[[Any], Any] | None,
    slots: int | None,
) -> Any:
    """``functx.remat_loop`` for a state of arrays. NOTE [loops in JAX].

    A loop with a condition and without a bound becomes ``lax.while_loop``, which JAX can't
    differentiate in reverse mode.
    """

    def goes_on(state: Any) -> Any:
        return True if cond is None else jnp.asarray(cond(state), bool).reshape(())

    if steps is None:
        return lax.while_loop(goes_on, body, state)

    def step(state: Any, _: Any) -> tuple[Any, None]:
        if cond is None:
            return body(state), None
        return lax.cond(goes_on(state), body, lambda s: s, state), None

    depth = _depth("remat_loop", steps, slots)
    return _advance(step, state, None, steps, False, depth, _branches(steps, depth))[0]


def _branches(steps: int, depth: int) -> int:
    """The least ``b`` with ``b ** depth >= steps``."""
    found = max(1, math.floor(steps ** (1 / depth)) - 1)
    while found**depth < steps:
        found += 1
    return found


def _kept(steps: int, depth: int) -> int:
    return depth * _branches(steps, depth) - (depth - 1)


def _depth(api: str, steps: int, slots: int | None) -> int:
    """How many scans to nest: two by default, else the fewest that the slots allow."""
    if slots is None:
        return min(2, max(1, steps - 1))
    most = max(1, (steps - 1).bit_length())
    for depth in range(1, most + 1):
        if _kept(steps, depth) <= slots:
            return depth
    raise ValueError(
        f"{api}: {steps} steps over JAX arrays need {_kept(steps, most)} slots or more, got"
        f" {slots}. Use more slots (loops over torch tensors need fewer)"
    )


def _advance(
    step: Step, carry: Any, xs: Any, steps: int, reverse: bool, depth: int, branches: int
) -> tuple[Any, Any]:
    """Run a loop by ``depth`` nested scans, in pieces of ``branches ** (depth - 1)`` steps.

    The remaining steps are a separate region, so that all pieces are equal and the program stays
    short.
    """
    if depth == 1 or steps <= 1:
        # XLA does not merge a recompute with the forward across the boundary of a scan.
        body = jax.checkpoint(step, prevent_cse=False)
        return lax.scan(body, carry, xs, steps, reverse)

    def inner(carry: Any, xs: Any, n: int) -> tuple[Any, Any]:
        return _advance(step, carry, xs, n, reverse, depth - 1, branches)

    size = branches ** (depth - 1)
    pieces, rest = divmod(steps, size)
    if not pieces:
        return inner(carry, xs, steps)
    # The remaining steps run last. If the loop runs backwards, they are at the front.
    start = rest if reverse else 0
    cut = jax.tree.map(
        lambda x: x[start : start + steps - rest].reshape(pieces, size, *jnp.shape(x)[1:]), xs
    )
    body = jax.checkpoint(lambda c, x: inner(c, x, size), prevent_cse=False)
    carry, ys = lax.scan(body, carry, cut, pieces, reverse)
    ys = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)
    if not rest:
        return carry, ys
    last = jax.tree.map(lambda x: x[:rest] if reverse else x[steps - rest :], xs)
    carry, more = jax.checkpoint(lambda c, x: inner(c, x, rest))(carry, last)
    parts = (more, ys) if reverse else (ys, more)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *parts)
