"""Pointwise arithmetic, comparison and logic; what has kinks is in `_kinks`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.scipy import special

from functx.compat._lowering._table import rule

_FLOAT_FUNCTIONS: dict[str, Any] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atan2": jnp.arctan2,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "deg2rad": jnp.deg2rad,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "lgamma": special.gammaln,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
    "rad2deg": jnp.rad2deg,
    "reciprocal": jnp.reciprocal,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}
_OTHER_FUNCTIONS: dict[str, Any] = {
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_not": jnp.bitwise_not,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_right_shift": jnp.right_shift,
    "bitwise_xor": jnp.bitwise_xor,
    "ceil": jnp.ceil,
    "conj": jnp.conj,
    "conj_physical": jnp.conj,
    "_conj": jnp.conj,
    "_conj_physical": jnp.conj,
    "_neg_view": jnp.negative,
    "copysign": jnp.copysign,
    "floor": jnp.floor,
    "gcd": jnp.gcd,
    "heaviside": jnp.heaviside,
    "hypot": jnp.hypot,
    "lcm": jnp.lcm,
    "mul": jnp.multiply,
    "neg": jnp.negative,
    "nextafter": jnp.nextafter,
    "positive": jnp.positive,
    "round": jnp.round,
    "square": jnp.square,
    "trunc": jnp.trunc,
}
_PREDICATES: dict[str, Any] = {
    "eq": jnp.equal,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "isneginf": jnp.isneginf,
    "isposinf": jnp.isposinf,
    "le": jnp.less_equal,
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "lt": jnp.less,
    "ne": jnp.not_equal,
    "signbit": jnp.signbit,
}

for _name, _fn in (_FLOAT_FUNCTIONS | _OTHER_FUNCTIONS).items():
    rule(_name, cast=True)(_fn)
for _name, _fn in _PREDICATES.items():
    rule(_name)(_fn)


@rule("add", cast=True)
def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    if jnp.result_type(x) == jnp.bool_:
        return jnp.logical_or(x, y if alpha else False)
    return jnp.add(x, y if alpha == 1 else alpha * y)


@rule("sub", cast=True)
def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return jnp.subtract(x, y if alpha == 1 else alpha * y)


@rule("rsub", cast=True)
def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return _sub(y, x, alpha)


@rule("div.Tensor", "div.Scalar", "true_divide", cast=True)
def _div(x: Any, y: Any) -> Any:
    return jnp.true_divide(x, y)


@rule("div.Tensor_mode", "div.Scalar_mode", cast=True)
def _div_mode(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    if rounding_mode == "floor":
        return floor_divide(x, y)
    if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return jnp.trunc(x / y)
    return lax.div(*jnp.broadcast_arrays(x, y))


@rule("floor_divide", cast=True)
def floor_divide(x: Any, y: Any) -> Any:
    """The floor of the quotient of two numbers, without a derivative."""
    if not jnp.issubdtype(jnp.result_type(x, y), jnp.floating):
        return jnp.floor_divide(x, y)
    # torch floors the exact quotient, not the rounded one (1 // 0.1 is 9), except where it is
    # infinite.
    quotient = x / y
    exact = jnp.floor(quotient)
    remainder = jnp.fmod(x, y)
    low = (x - remainder) / y - jnp.where((remainder != 0) & ((y < 0) != (remainder < 0)), 1, 0)
    rounded = jnp.where(low == 0, jnp.copysign(0.0, quotient), jnp.round(low))
    return lax.stop_gradient(jnp.where(jnp.isfinite(quotient) & (y != 0), rounded, exact))


@rule("fmod", cast=True)
def _fmod(x: Any, y: Any) -> Any:
    return jnp.fmod(x, y)


@rule("pow", cast=True)
def _pow(x: Any, y: Any) -> Any:
    whole = isinstance(y, int | float) and float(y).is_integer() and abs(y) < 2**31
    if whole and (y >= 0 or jnp.issubdtype(jnp.result_type(x), jnp.inexact)):
        return lax.integer_pow(jnp.asarray(x), int(y))
    if isinstance(y, float) and y == 0.5:
        return jnp.sqrt(x)
    if jnp.issubdtype(jnp.result_type(x, y), jnp.integer):
        # Negative exponents of integers truncate in torch; jnp has no value for them.
        base, exponent = jnp.broadcast_arrays(jnp.asarray(x), jnp.asarray(y))
        odd = jnp.where(exponent % 2 == 0, 1, base)
        negative = jnp.where(abs(base) == 1, odd, 0)
        return jnp.where(exponent >= 0, base ** jnp.maximum(exponent, 0), negative)
    kind = jnp.result_type(x, y)
    return _power(*jnp.broadcast_arrays(jnp.asarray(x, kind), jnp.asarray(y, kind)))


@jax.custom_jvp
def _power(x: Any, y: Any) -> Any:
    return jnp.power(x, y)


@partial(_power.defjvp, symbolic_zeros=True)
def _power_jvp(primals: Any, tangents: Any) -> Any:
    # Derivatives of 0 ** y are torch's: 0 in the base at y = 0, in the exponent from there on.
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


@rule("xlogy", "special_xlogy", cast=True)
def _xlogy(x: Any, y: Any) -> Any:
    return jnp.where(jnp.isnan(y), jnp.nan, special.xlogy(x, y))


@rule("special_xlog1py", cast=True)
def _xlog1py(x: Any, y: Any) -> Any:
    return jnp.where(jnp.isnan(y), jnp.nan, special.xlog1py(x, y))


@rule("digamma", cast=True)
def _digamma(x: Any) -> Any:
    # A pole of either sign at zero, where JAX has NaN.
    return jnp.where(x == 0, -1 / x, special.digamma(jnp.where(x == 0, 1, x)))


@rule("sgn", cast=True)
def _sgn(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.where(jnp.isnan(x), 0, jnp.sign(x))
    # JAX's has no derivative, and that of the phase of a complex number is not zero.
    safe = jnp.where(x == 0, 1, x)
    return jnp.where(x == 0, 0, safe / jnp.abs(safe))


@rule("frac")
def _frac(x: Any) -> Any:
    return x - jnp.trunc(x)


@rule("round.decimals")
def _round_decimals(x: Any, decimals: int = 0) -> Any:
    scale = 10.0 ** abs(decimals)
    return jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale


@rule("fmax", cast=True)
def _fmax(x: Any, y: Any) -> Any:
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


@rule("fmin", cast=True)
def _fmin(x: Any, y: Any) -> Any:
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


@rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition.astype(bool), x, y)


@rule("lerp", cast=True)
def _lerp(x: Any, end: Any, weight: Any) -> Any:
    # torch's two formulas, by the size of the weight: exact at both ends.
    near = jnp.abs(jnp.asarray(weight)) < 0.5
    return jnp.where(near, x + weight * (end - x), end - (end - x) * (1 - weight))


@rule("addcmul", cast=True)
def _addcmul(x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return x + value * a * b


@rule("addcdiv", cast=True)
def _addcdiv(x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return x + value * (a / b)


@rule("nan_to_num", cast=True)
def _nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    info = jnp.finfo(x.dtype)
    return jnp.where(
        jnp.isnan(x),
        0.0 if nan is None else nan,
        jnp.where(
            jnp.isposinf(x),
            info.max if posinf is None else posinf,
            jnp.where(jnp.isneginf(x), info.min if neginf is None else neginf, x),
        ),
    )


@rule("isclose")
def _isclose(
    x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Any:
    return jnp.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)


@rule("angle")
def _angle(x: Any) -> Any:
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, np.pi, 0.0))


@rule("real")
def _real(x: Any) -> Any:
    return jnp.real(x)


@rule("imag")
def _imag(x: Any) -> Any:
    return jnp.imag(x)


@rule("complex")
def _complex(real: Any, imag: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@rule("polar")
def _polar(r: Any, angle: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(r * jnp.cos(angle), r * jnp.sin(angle)))


@rule("view_as_real")
def _view_as_real(x: Any) -> Any:
    return jnp.stack([x.real, x.imag], -1)


@rule("view_as_complex")
def _view_as_complex(x: Any) -> Any:
    return lax.complex(x[..., 0], x[..., 1])


@rule("frexp.Tensor")
def _frexp(x: Any) -> Any:
    return jnp.frexp(x)


@rule("ldexp", cast=True)
def _ldexp(x: Any, exponent: Any) -> Any:
    return x * jnp.exp2(exponent)
