"""Pointwise arithmetic, comparison and logic, with torch's values and derivatives at kinks.

The derivative of ``abs`` at zero is zero. That of ``clamp`` at its bounds is one (before torch
2.14). Ties of ``maximum`` share the derivative equally. A NaN has the sign 0, its derivative
through ``clamp`` is zero, and ``maximum`` passes the full derivative to both sides.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.scipy import special

from functx.compat._to_jax.rules.table import rule, rules
from functx.compat._to_jax.rules.views import straight_through

# Functions with the same name and meaning in torch and jax.numpy.
_CAST = """
acos asin asinh atan atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil cos cosh deg2rad exp exp2 expm1 floor fmod gcd
lcm log log10 log1p log2 logaddexp2 nextafter positive rad2deg reciprocal
round sin sinh sqrt square tan tanh trunc
"""
_PLAIN = """
frexp imag isfinite isinf isnan isneginf isposinf logical_and logical_not logical_or logical_xor
real signbit
"""
rules({name: getattr(jnp, name) for name in _CAST.split()}, cast=True)
rules({name: getattr(jnp, name) for name in _PLAIN.split()})
rules({name: getattr(operator, name) for name in ("eq", "ge", "gt", "le", "lt", "ne")})
rules(
    {
        "__lshift__": jnp.left_shift,
        "__rshift__": jnp.right_shift,
        "addcdiv": lambda x, a, b, value=1: x + value * (a / b),
        "addcmul": lambda x, a, b, value=1: x + value * a * b,
        "conj conj_physical _conj _conj_physical": jnp.conj,
        "div.Tensor div.Scalar": jnp.true_divide,
        "erf": special.erf,
        "erfc": special.erfc,
        "erfinv prims::erf_inv": special.erfinv,
        "fmax": lambda x, y: jnp.where((x >= y) | jnp.isnan(y), x, y),
        "fmin": lambda x, y: jnp.where((x <= y) | jnp.isnan(y), x, y),
        "heaviside": lambda x, y: jnp.where(x == 0, y, jnp.where(x > 0, 1, 0)),
        "lgamma": special.gammaln,
        "mul": jnp.multiply,
        "neg _neg_view": jnp.negative,
        "rsqrt": lax.rsqrt,
        "sigmoid": jax.nn.sigmoid,
        "sub": lambda x, y, alpha=1: jnp.subtract(x, y if alpha == 1 else alpha * y),
    },
    cast=True,
)
rules(
    {
        "complex": lambda a, b: lax.complex(*jnp.broadcast_arrays(a, b)),
        "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
        "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
        "where": lambda condition, x, y: jnp.where(condition.astype(bool), x, y),
    }
)


def _floating(*xs: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(*xs), jnp.floating))


@rule("add", cast=True)
def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    if jnp.result_type(x) == jnp.bool_:
        return jnp.logical_or(x, y if alpha else False)
    return jnp.add(x, y if alpha == 1 else alpha * y)


@rule("prims::div", cast=True)
def _quotient(x: Any, y: Any) -> Any:
    """The quotient, of integers without its fraction."""
    kind = jnp.result_type(x, y)
    return lax.div(*jnp.broadcast_arrays(jnp.asarray(x, kind), jnp.asarray(y, kind)))


@rule("div.Tensor_mode", "div.Scalar_mode", cast=True)
def _div_mode(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    return _floor_divide(x, y) if rounding_mode == "floor" else jnp.trunc(_quotient(x, y))


@rule("floor_divide", cast=True)
def _floor_divide(x: Any, y: Any) -> Any:
    """The floor of the quotient of two numbers, without a derivative."""
    if not _floating(x, y):
        return jnp.floor_divide(x, y)
    # torch floors the exact quotient, not the rounded one (1 // 0.1 is 9).
    quotient = x / y
    remainder = jnp.fmod(x, y)
    low = (x - remainder) / y - jnp.where((remainder != 0) & ((y < 0) != (remainder < 0)), 1, 0)
    rounded = jnp.where(low == 0, jnp.copysign(0.0, quotient), jnp.round(low))
    return lax.stop_gradient(jnp.where(y != 0, rounded, quotient))


@rule("pow", cast=True)
def _pow(x: Any, y: Any) -> Any:
    whole = isinstance(y, int | float) and float(y).is_integer() and abs(y) < 2**31
    if whole and (y >= 0 or jnp.issubdtype(jnp.result_type(x), jnp.inexact)):
        return lax.integer_pow(jnp.asarray(x), int(y))
    if isinstance(y, float) and y == 0.5:
        return jnp.sqrt(x)
    if jnp.issubdtype(jnp.result_type(x, y), jnp.integer):
        # With a negative exponent, torch truncates the power of an integer; jnp does not define it.
        base, exponent = jnp.broadcast_arrays(jnp.asarray(x), jnp.asarray(y))
        odd = jnp.where(exponent % 2 == 0, 1, base)
        negative = jnp.where(abs(base) == 1, odd, 0)
        return jnp.where(exponent >= 0, base ** jnp.maximum(exponent, 0), negative)
    kind = jnp.result_type(x, y)
    return _power(*jnp.broadcast_arrays(jnp.asarray(x, kind), jnp.asarray(y, kind)))


@jax.custom_jvp
def _power(x: Any, y: Any) -> Any:
    if not jnp.iscomplexobj(y):
        return jnp.power(x, y)
    # By the exponent's real part; JAX has NaN.
    zero = (x == 0) & (y.real > 0)
    return jnp.where(zero, 0, jnp.power(jnp.where(zero, 1, x), y))


@partial(_power.defjvp, symbolic_zeros=True)
def _power_jvp(primals: Any, tangents: Any) -> Any:
    # The derivatives of 0 ** y are torch's: with respect to the base it is 0 at y = 0, with respect
    # to the exponent it is 0 for y >= 0.
    (x, y), (dx, dy) = primals, tangents
    out = _power(x, y)
    tangent = jnp.zeros_like(out)
    if not isinstance(dx, SymbolicZero):
        constant = y == 0
        less = _power(x, jnp.where(constant, 1, y - 1))
        tangent += dx * jnp.where(constant, 0, y * less)
    if not isinstance(dy, SymbolicZero):
        zero = (x == 0) & (jnp.real(y) >= 0)
        tangent += dy * jnp.where(zero, 0, out * jnp.log(jnp.where(zero, 1, x)))
    return out, tangent


def _of_log(log: Any, plus: int) -> Any:
    """The function ``x * log(y)``. At x = 0 it is zero, also its slope if log(y) is undefined."""

    @jax.custom_jvp
    def product(x: Any, y: Any) -> Any:
        zero = x == 0
        return jnp.where(jnp.isnan(y), jnp.nan, jnp.where(zero, 0, x * log(jnp.where(zero, 1, y))))

    @product.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, y), (dx, dy) = primals, tangents
        nothing = (x == 0) & (y + plus <= 0)
        slope = jnp.where(nothing, 0, log(jnp.where(nothing, 1, y)))
        return product(x, y), dx * slope + dy * (x / (y + plus))

    return lambda x, y: product(*_floats(x, y))


def _floats(*xs: Any) -> Any:
    """Convert arguments, which may be Python numbers, to arrays of the same shape and dtype."""
    kind = jnp.result_type(*xs)
    return jnp.broadcast_arrays(*(jnp.asarray(x, kind) for x in xs))


rules(
    {"xlogy special_xlogy": _of_log(jnp.log, 0), "special_xlog1py": _of_log(jnp.log1p, 1)},
    cast=True,
)


@jax.custom_jvp
def _hypotenuse(x: Any, y: Any) -> Any:
    return jnp.hypot(x, y)


@_hypotenuse.defjvp
def _hypotenuse_jvp(primals: Any, tangents: Any) -> Any:
    # The second derivatives of jnp.hypot are zero where x and y have the same absolute value.
    (x, y), (dx, dy), out = primals, tangents, _hypotenuse(*primals)
    return out, dx * (x / out) + dy * (y / out)


rules({"hypot": lambda x, y: _hypotenuse(*_floats(x, y))}, cast=True)


@rule("copysign", cast=True)
def _copysign(x: Any, y: Any) -> Any:
    # At zero torch's derivative is zero; JAX takes the derivative from one side.
    x, y = _floats(x, y)
    turn = jnp.where(x == 0, 0, jnp.copysign(1.0, x) * jnp.copysign(1.0, y))
    return straight_through(jnp.copysign(x, y), x * lax.stop_gradient(turn))


def sine_ratio(x: Any) -> Any:
    """The function ``sin(x) / x``. Near zero, where quotients lose digits, it uses the series."""
    near = jnp.abs(x) < 0.5
    square = jnp.where(near, x * x, 0)
    series: Any = jnp.ones_like(x)
    for k in range(9, 0, -1):
        series = 1 - series * square / (2 * k * (2 * k + 1))
    far = jnp.where(near, 1, x)
    return jnp.where(near, series, jnp.sin(far) / far)


rules({"sinc": lambda x: sine_ratio(np.pi * x)}, cast=True)


@jax.custom_jvp
def _complex_acosh(x: Any) -> Any:
    return jnp.arccosh(x)


@_complex_acosh.defjvp
def _complex_acosh_jvp(primals: Any, tangents: Any) -> Any:
    (x,) = primals
    # One root of (x - 1) * (x + 1), as JAX takes it, has the other sign where x.real < 0.
    return _complex_acosh(x), tangents[0] / (jnp.sqrt(x - 1) * jnp.sqrt(x + 1))


@rule("acosh", cast=True)
def _acosh(x: Any) -> Any:
    return _complex_acosh(x) if jnp.iscomplexobj(x) else jnp.arccosh(x)


@rule("logaddexp", cast=True)
def logaddexp(x: Any, y: Any) -> Any:
    """The logarithm of the sum of two exponentials."""
    if not jnp.iscomplexobj(x):
        return jnp.logaddexp(x, y)
    # JAX brings the angle between -pi and pi, torch does not.
    first = x.real >= y.real
    larger, smaller = jnp.where(first, x, y), jnp.where(first, y, x)
    none = jnp.isneginf(larger.real)  # neither has a logarithm: both are of zero
    difference = jnp.where(none, 0, smaller - larger)
    return jnp.where(none, smaller, larger + jnp.log1p(jnp.exp(difference)))


@rule("digamma", cast=True)
def _digamma(x: Any) -> Any:
    # At 0.0 and -0.0 torch returns infinity with the opposite sign; JAX returns NaN.
    return jnp.where(x == 0, -1 / x, special.digamma(jnp.where(x == 0, 1, x)))


@rule("round.decimals")
def _round_decimals(x: Any, decimals: int = 0) -> Any:
    scale = 10.0 ** abs(decimals)
    return jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale


@rule("sign", "sgn")
def _sign(x: Any) -> Any:
    if _floating(x):
        return jnp.where(jnp.isnan(x), 0, jnp.sign(x))
    if not jnp.iscomplexobj(x):
        return x if x.dtype == jnp.bool_ else jnp.sign(x)
    # jnp.sign has no derivative, but the phase of a complex number has one that is not zero.
    safe = jnp.where(x == 0, 1, x)
    return jnp.where(x == 0, 0, safe / jnp.abs(safe))


@rule("atan2", cast=True)
def _atan2(y: Any, x: Any) -> Any:
    # At the origin torch's derivative is zero; JAX's is NaN.
    origin = (y == 0) & (x == 0)
    away = jnp.arctan2(y, jnp.where(origin, 1, x))
    return jnp.where(origin, lax.stop_gradient(jnp.arctan2(y, x)), away)


@rule("angle")
def _angle(x: Any) -> Any:
    if jnp.iscomplexobj(x):
        return _atan2(x.imag, x.real)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, np.pi, 0.0))


@jax.custom_jvp
def _magnitude(x: Any) -> Any:
    return jnp.abs(x)


@_magnitude.defjvp
def _magnitude_jvp(primals: Any, tangents: Any) -> Any:
    return _magnitude(*primals), tangents[0] * lax.stop_gradient(_sign(*primals))


@rule("abs")
def absolute(x: Any) -> Any:
    """The absolute value, with torch's derivative (zero) at zero."""
    if _floating(x):
        return _magnitude(x)
    if not jnp.iscomplexobj(x):
        return jnp.abs(x)
    zero = x == 0
    return jnp.where(zero, 0, jnp.abs(jnp.where(zero, 1, x)))


@jax.custom_jvp
def _larger(x: Any, y: Any) -> Any:
    return jnp.maximum(x, y)


@_larger.defjvp
def _larger_jvp(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    share = jnp.where(x == y, 0.5, 1.0).astype(dx.dtype)
    return _larger(x, y), jnp.where(x < y, 0, dx * share) + jnp.where(y < x, 0, dy * share)


@rule("maximum", cast=True)
def _maximum(x: Any, y: Any) -> Any:
    return _larger(*jnp.broadcast_arrays(x, y)) if _floating(x, y) else jnp.maximum(x, y)


@rule("minimum", cast=True)
def _minimum(x: Any, y: Any) -> Any:
    return -_larger(*jnp.broadcast_arrays(-x, -y)) if _floating(x, y) else jnp.minimum(x, y)


# Since torch 2.14, the derivative of ``clamp`` where ``x`` equals a bound is zero if the bound is a
# number. If it is a tensor, ``x`` and the bound share the derivative.
_SINCE_2_14 = torch.__version__ >= "2.14"


@rule("clamp", "clamp_min", cast=True)
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    # jnp.where instead of jnp.clip, whose derivative at a bound differs from torch's.
    for bound, inside in ((min, jnp.greater), (max, jnp.less)):
        if bound is not None:
            within = inside(x, bound) | (False if _SINCE_2_14 else x == bound)
            x = jnp.where(within, x, jnp.where(jnp.isnan(x), lax.stop_gradient(x), bound))
    return x


@rule("clamp.Tensor", "clamp_min.Tensor", cast=True)
def _clamp_by_tensors(x: Any, min: Any = None, max: Any = None) -> Any:
    if not _SINCE_2_14:
        if min is not None and max is not None:  # equal bounds have no derivative
            min = jnp.where(min < max, min, lax.stop_gradient(min))
        return _clamp(x, min, max)
    x = x if min is None else _maximum(x, min)
    return x if max is None else _minimum(x, max)


rules({"clamp_max": lambda x, max: _clamp(x, None, max)}, cast=True)
rules({"clamp_max.Tensor": lambda x, max: _clamp_by_tensors(x, None, max)}, cast=True)


@jax.custom_jvp
def _modulo(x: Any, y: Any) -> Any:
    return jnp.remainder(x, y)


@_modulo.defjvp
def _modulo_jvp(primals: Any, tangents: Any) -> Any:
    # JAX's derivative adds up two quotients, each of which is rounded.
    (x, y), (dx, dy) = primals, tangents
    return _modulo(x, y), dx - _floor_divide(x, y) * dy


@rule("remainder", cast=True)
def _remainder(x: Any, y: Any) -> Any:
    return _modulo(*jnp.broadcast_arrays(x, y)) if _floating(x, y) else jnp.remainder(x, y)
