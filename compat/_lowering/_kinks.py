"""Where a derivative jumps, and at NaN: values and derivatives are torch's.

Zero at zero for ``abs``, one at the bounds of ``clamp``, shared equally at the ties of ``maximum``
and ``max``.  A NaN has sign 0; none of its derivative comes through ``clamp``, all of it through
both sides of ``maximum``, and ``max`` gives it to the NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._lowering._pointwise import floor_divide
from functx.compat._lowering._table import rule


def _floating(*xs: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(*xs), jnp.floating))


def _sign_of(x: Any) -> Any:
    return jnp.where(jnp.isnan(x), 0, jnp.sign(x))


@jax.custom_jvp
def _magnitude(x: Any) -> Any:
    return jnp.abs(x)


@_magnitude.defjvp
def _magnitude_jvp(primals: Any, tangents: Any) -> Any:
    return _magnitude(*primals), tangents[0] * lax.stop_gradient(_sign_of(*primals))


@rule("abs", cast=False)
def _abs(x: Any) -> Any:
    if _floating(x):
        return _magnitude(x)
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.abs(x)
    zero = x == 0
    return jnp.where(zero, 0, jnp.abs(jnp.where(zero, 1, x)))


@rule("sign")
def _sign(x: Any) -> Any:
    if not _floating(x):
        return x if x.dtype == jnp.bool_ else jnp.sign(x)
    return _sign_of(x)


@jax.custom_jvp
def _larger(x: Any, y: Any) -> Any:
    return jnp.maximum(x, y)


@_larger.defjvp
def _larger_jvp(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    share = jnp.where(x == y, 0.5, 1.0).astype(dx.dtype)
    return _larger(x, y), jnp.where(x < y, 0, dx * share) + jnp.where(y < x, 0, dy * share)


@rule("maximum", "fmax.prefer", cast=True)
def _maximum(x: Any, y: Any) -> Any:
    return _larger(*jnp.broadcast_arrays(x, y)) if _floating(x, y) else jnp.maximum(x, y)


@rule("minimum", cast=True)
def _minimum(x: Any, y: Any) -> Any:
    return -_larger(*jnp.broadcast_arrays(-x, -y)) if _floating(x, y) else jnp.minimum(x, y)


@rule("clamp", "clip", cast=True)
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    # Selections, not jnp.clip: at a bound the derivative is that of x.
    if min is not None:
        x = jnp.where(x >= min, x, jnp.where(jnp.isnan(x), lax.stop_gradient(x), min))
    if max is not None:
        x = jnp.where(x <= max, x, jnp.where(jnp.isnan(x), lax.stop_gradient(x), max))
    return x


@rule("clamp_min", cast=True)
def _clamp_min(x: Any, min: Any) -> Any:
    return _clamp(x, min)


@rule("clamp_max", cast=True)
def _clamp_max(x: Any, max: Any) -> Any:
    return _clamp(x, None, max)


def _extreme(x: Any, reduce: Any) -> Any:
    if not _floating(x):
        return reduce(x)
    nan = jnp.isnan(x)
    there = jnp.any(nan)
    shared = jnp.sum(jnp.where(nan, x, 0)) / jnp.maximum(jnp.sum(nan), 1)
    return jnp.where(there, shared, reduce(jnp.where(there, 0, x)))


@rule("max")
def _max(x: Any) -> Any:
    return _extreme(x, jnp.max)


@rule("min")
def _min(x: Any) -> Any:
    return _extreme(x, jnp.min)


@jax.custom_jvp
def _modulo(x: Any, y: Any) -> Any:
    return jnp.remainder(x, y)


@_modulo.defjvp
def _modulo_jvp(primals: Any, tangents: Any) -> Any:
    # JAX adds up two quotients that are rounded on their own.
    (x, y), (dx, dy) = primals, tangents
    return _modulo(x, y), dx - floor_divide(x, y) * dy


@rule("remainder", cast=True)
def _remainder(x: Any, y: Any) -> Any:
    return _modulo(*jnp.broadcast_arrays(x, y)) if _floating(x, y) else jnp.remainder(x, y)
