"""Primitives that torch's reference decompositions are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from functx.compat._lowering import _kinks, _pointwise, _special  # noqa: F401  looked up below
from functx.compat._lowering._table import registered, rule

# Primitives that say the same as the ATen operation of that name, and those of another.
_SAME_NAME = """
abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil conj
conj_physical cos cosh digamma eq erf erfc exp exp2 expm1 floor fmax fmin fmod gcd ge gt hypot
imag isfinite le lgamma log log10 log1p log2 lt maximum minimum mul ne neg nextafter pow real
reciprocal remainder round rsqrt sign signbit sin sinh sqrt sub tan tanh trunc zeta add
""".split()  # noqa: SIM905
_OTHER_NAME = {"erf_inv": "erfinv", "bessel_i0": "i0", "where": "where.self"}


def _register() -> None:
    for prim, aten in ({name: name for name in _SAME_NAME} | _OTHER_NAME).items():
        known = registered(f"aten::{aten}") or registered(f"aten::special_{aten}")
        if known is None:
            raise LookupError(f"prims::{prim} shall be as aten::{aten}, which has no rule")
        rule(f"prims::{prim}", cast=known.cast, context=known.context)(known.fn)


_register()


@rule("prims::div", cast=True)
def _div(x: Any, y: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(x), jnp.integer):
        return lax.div(*jnp.broadcast_arrays(x, y))
    return jnp.true_divide(x, y)


@rule("prims::convert_element_type")
def _convert(x: Any, dtype: Any) -> Any:
    return x  # the interpreter gives it the traced dtype


@rule("prims::broadcast_in_dim")
def _broadcast_in_dim(x: Any, shape: Sequence[int], dims: Sequence[int]) -> Any:
    return lax.broadcast_in_dim(x, tuple(shape), tuple(dims))


@rule("prims::view_of", "prims::copy_strided", "prims::clone")
def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


@rule("prims::reshape", "prims::split_dim", "prims::collapse_view", "prims::collapse", context=True)
def _reshape(x: Any, *_: Any, ctx: Any) -> Any:
    return jnp.reshape(x, ctx.shape)


@rule("prims::squeeze")
def _squeeze(x: Any, dims: Sequence[int]) -> Any:
    return jnp.squeeze(x, tuple(dims))


@rule("prims::transpose")
def _transpose(x: Any, permutation: Sequence[int]) -> Any:
    return jnp.transpose(x, tuple(permutation))


@rule("prims::rev")
def _rev(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims))


@rule("prims::cat")
def _cat(tensors: Sequence[Any], dim: int) -> Any:
    return jnp.concatenate(list(tensors), dim)


@rule("prims::sum", "prims::xor_sum")
def _sum(x: Any, dims: Sequence[int], *, output_dtype: Any = None) -> Any:
    return jnp.sum(x, tuple(dims))


@rule("prims::prod")
def _prod(x: Any, dims: Sequence[int], *, output_dtype: Any = None) -> Any:
    return jnp.prod(x, tuple(dims))


@rule("prims::amax")
def _amax(x: Any, dims: Sequence[int], *, output_dtype: Any = None) -> Any:
    return jnp.max(x, tuple(dims))


@rule("prims::amin")
def _amin(x: Any, dims: Sequence[int], *, output_dtype: Any = None) -> Any:
    return jnp.min(x, tuple(dims))


@rule("prims::var")
def _var(x: Any, dims: Sequence[int], correction: float = 1, *, output_dtype: Any = None) -> Any:
    return jnp.var(x, tuple(dims), ddof=int(correction or 0))


@rule("prims::iota", context=True)
def _iota(n: int, *, start: int, step: int, ctx: Any, **_: Any) -> Any:
    return (jnp.arange(n) * step + start).astype(ctx.dtype)


@rule("prims::empty_strided", "prims::empty", "prims::empty_permuted", context=True)
def _empty(*_: Any, ctx: Any, **__: Any) -> Any:
    return jnp.zeros(ctx.shape, ctx.dtype)


@rule("prims::full", "prims::full_like", context=True)
def _full(_: Any, value: Any, *__: Any, ctx: Any, **___: Any) -> Any:
    return jnp.full(ctx.shape, value, ctx.dtype)


@rule("prims::scalar_tensor", context=True)
def _scalar_tensor(value: Any, *, ctx: Any, **_: Any) -> Any:
    return jnp.asarray(value, ctx.dtype)


@rule("prims::frexp")
def _frexp(x: Any) -> Any:
    return jnp.frexp(x)
