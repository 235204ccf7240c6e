"""Operations whose derivative torch computes from their result.

JAX computes some from an inner value instead, which has no name when the result does: a region that
saves the result by name would recompute it all the same.  Here the derivative reads the named one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tangent = Callable[..., Any]

_TANGENTS: dict[str, Tangent] = {
    "aten::tanh": lambda y, t: t * (1 - y * y),
    "aten::sigmoid": lambda y, t: t * (y * (1 - y)),
    "aten::exp": lambda y, t: t * y,
    "aten::exp2": lambda y, t: t * (y * jnp.log(2.0).astype(y.dtype)),
    "aten::expm1": lambda y, t: t * (y + 1),
    "aten::sqrt": lambda y, t: t / (2 * y),
    "aten::rsqrt": lambda y, t: t * (-0.5 * y**3),
    "aten::reciprocal": lambda y, t: t * (-y * y),
    "aten::relu": lambda y, t: jnp.where(y > 0, t, 0),
    "aten::_softmax": lambda y, t, dim, *_: y * (t - jnp.sum(y * t, dim, keepdims=True)),
    "aten::_log_softmax": lambda y, t, dim, *_: t - jnp.sum(jnp.exp(y) * t, dim, keepdims=True),
}


def from_result(
    name: str, compute: Callable[..., Any], args: tuple[Any, ...], mark: Callable[[Any], Any]
) -> Any:
    """``mark(compute(*args))``, differentiated by way of the marked value where torch would.

    Args:
        name: of the operation, without its overload.
        compute: its rule.
        args: its arguments.
        mark: gives the result a name.
    """
    tangent = _TANGENTS.get(name)
    x = args[0] if args else None
    real = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    if tangent is None or not real:
        return mark(compute(*args))

    @jax.custom_jvp
    def marked(x: Any) -> Any:
        return mark(compute(x, *args[1:]))

    @marked.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y = mark(compute(primals[0], *args[1:]))
        return y, tangent(y, tangents[0].astype(y.dtype), *args[1:])

    return marked(x)
