"""Orthogonal polynomials of an integer degree that may be an array.

Each is a three-term recurrence, run as a loop up to the largest degree asked for; where the degree
is smaller the value of that step is taken.  Degrees are data, so the loop has a traced bound and
these are not differentiated in reverse (nor are they in torch).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from functx.compat._lowering._table import rule

Step = Callable[[Any, Any, Any, Any], Any]


def _recurrence(first: Callable[[Any], Any], step: Step) -> Callable[[Any, Any], Any]:
    """The polynomials p[0] = 1, p[1] = first(x), p[k + 1] = step(k, x, p[k], p[k - 1])."""

    def polynomial(x: Any, n: Any) -> Any:
        x, n = jnp.broadcast_arrays(jnp.asarray(x), jnp.asarray(n))
        dtype = jnp.result_type(x, jnp.float32)
        x = x.astype(dtype)
        degree = jnp.trunc(n.astype(dtype))
        one = jnp.ones_like(x)
        start = first(x)
        value = jnp.where(degree < 0, 0, jnp.where(degree == 0, one, start))

        def body(k: Any, state: Any) -> Any:
            now, before, value = state
            after = step(k.astype(dtype), x, now, before)
            return after, now, jnp.where(degree == k + 1, after, value)

        top = jnp.max(degree, initial=0).astype(jnp.int32)
        return lax.fori_loop(jnp.int32(1), jnp.maximum(top, 1), body, (start, one, value))[2]

    return polynomial


def _chebyshev(k: Any, x: Any, now: Any, before: Any) -> Any:
    return 2 * x * now - before


_POLYNOMIALS = {
    "chebyshev_polynomial_t": _recurrence(lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": _recurrence(lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": _recurrence(lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": _recurrence(lambda x: 2 * x + 1, _chebyshev),
    "hermite_polynomial_h": _recurrence(lambda x: 2 * x, lambda k, x, p, q: 2 * (x * p - k * q)),
    "hermite_polynomial_he": _recurrence(lambda x: x, lambda k, x, p, q: x * p - k * q),
    "laguerre_polynomial_l": _recurrence(
        lambda x: 1 - x, lambda k, x, p, q: ((2 * k + 1 - x) * p - k * q) / (k + 1)
    ),
    "legendre_polynomial_p": _recurrence(
        lambda x: x, lambda k, x, p, q: ((2 * k + 1) * x * p - k * q) / (k + 1)
    ),
}

for _name, _fn in _POLYNOMIALS.items():
    rule(f"special_{_name}")(_fn)
    if _name.startswith("chebyshev"):
        rule(f"special_shifted_{_name}")(lambda x, n, fn=_fn: fn(2 * jnp.asarray(x) - 1, n))
