"""Special functions: those of JAX, Bessel functions and orthogonal polynomials.

Sources of the Bessel functions: Abramowitz and Stegun, chapters 9 and 10, and integral
representations by quadrature that converges exponentially for periodic integrands (the trapezoidal
rule).  They are accurate to float32 rounding over the range in which torch's kernels are.

A polynomial is a three-term recurrence, run as a loop up to the largest degree asked for.  Degrees
are data, so the loop has a traced bound and is not differentiated in reverse (nor is it in torch).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from functx.compat._to_jax.rules.pointwise import absolute, sine_ratio
from functx.compat._to_jax.rules.table import rule, rules

_POINTS = 128


def _at_zero(f: Callable[[Any, Any], Any], a: Any, x: Any, value: float) -> Any:
    """An incomplete gamma function. At order zero it has its limit; JAX's function gives NaN."""
    limit = (a == 0) & (x > 0)
    return jnp.where(limit, value, f(jnp.where(limit, 1.0, a), x))


rules(
    {
        "igamma": lambda a, x: _at_zero(special.gammainc, a, x, 1.0),
        "igammac": lambda a, x: _at_zero(special.gammaincc, a, x, 0.0),
        "special_entr": special.entr,
        "special_log_ndtr": special.log_ndtr,
        "special_ndtr": special.ndtr,
        "special_ndtri": special.ndtri,
        "special_zeta prims::zeta": special.zeta,
    },
    cast=True,
)


# The derivatives of JAX's own modified Bessel functions are wrong at zero: that of i0 is 1/2 there.
_i0, _i1, _i0e, _i1e = (
    jax.custom_jvp(f) for f in (special.i0, special.i1, special.i0e, special.i1e)
)


def _i1_ratio(x: Any, i1: Any, scale: Any) -> Any:
    """The function ``i1(x) / x``, scaled. Near zero it uses the series."""
    near = jnp.abs(x) < 1
    square = jnp.where(near, x * x / 4, 0)
    series: Any = jnp.ones_like(x)
    for k in range(10, 0, -1):
        series = 1 + series * square / (k * (k + 1))
    far = jnp.where(near, 1, x)
    return jnp.where(near, series / 2 * scale(jnp.where(near, x, 0)), i1(far) / far)


def _decay(x: Any) -> Any:
    return jnp.exp(-absolute(x))


_i0.defjvps(lambda dx, out, x: dx * _i1(x))
_i1.defjvps(lambda dx, out, x: dx * (_i0(x) - _i1_ratio(x, _i1, jnp.ones_like)))
_i0e.defjvps(lambda dx, out, x: dx * (_i1e(x) - jnp.sign(x) * _i0e(x)))
_i1e.defjvps(lambda dx, out, x: dx * (_i0e(x) - jnp.sign(x) * _i1e(x) - _i1_ratio(x, _i1e, _decay)))
rules(
    {
        "i0 special_modified_bessel_i0 prims::bessel_i0": _i0,
        "special_i0e": _i0e,
        "special_i1 special_modified_bessel_i1": _i1,
        "special_i1e": _i1e,
    },
    cast=True,
)

rule("mvlgamma")(special.multigammaln)
rule("polygamma")(lambda n, x: special.polygamma(n, x) if n else special.digamma(x))


def _mean(values: Any, weights: Any) -> Any:
    return jnp.sum(values * jnp.asarray(weights / np.sum(weights), values.dtype), -1)


def _trapezoid(points: int) -> tuple[Any, Any]:
    """Points in [0, 1] and the weights of the trapezoidal rule."""
    weights = np.ones(points + 1)
    weights[[0, -1]] = 0.5
    return np.linspace(0, 1, points + 1), weights


# Up to this value, the first terms of the series at zero are exact up to rounding.
_CLOSE = 1e-6
# Above this value, series in 1 / x are exact up to rounding; quadrature with these few points
# isn't.
_FAR = 30.0


def _far(x: Any, order: int, shift: float) -> Any:
    """Hankel's expansion, A&S 9.2.5 and 9.2.6: J_n(x), and Y_n(x) for a shift of -pi/2."""
    four, z = 4.0 * order * order, 1 / (8 * x)
    even = odd = jnp.zeros_like(x)
    term = jnp.ones_like(x)
    for k in range(20):
        sign = -1 if k % 4 > 1 else 1
        even, odd = (even + sign * term, odd) if k % 2 == 0 else (even, odd + sign * term)
        term = term * (four - (2 * k + 1) ** 2) / (k + 1) * z
    angle = x - (order / 2 + 0.25) * np.pi + shift
    return jnp.sqrt(2 / (np.pi * x)) * (jnp.cos(angle) * even - jnp.sin(angle) * odd)


def _j(x: Any, order: int) -> Any:
    """A&S 9.1.21, the mean over [0, pi] of a function that is smooth, even and periodic."""
    points, weights = _trapezoid(_POINTS)
    theta = jnp.asarray(np.pi * points, x.dtype)
    size = jnp.abs(x)
    near = jnp.minimum(size, _FAR)
    out = _mean(jnp.cos(order * theta - near[..., None] * jnp.sin(theta)), weights)
    out = jnp.where(size > _FAR, _far(jnp.maximum(size, _FAR), order, 0.0), out)
    out = jnp.where(jnp.isinf(x), 0, out)
    return jnp.where(x < 0, -out, out) if order else out


def _k(x: Any, order: int) -> Any:
    """exp(x) K_n(x) = integral over t > 0 of exp(-x (cosh t - 1)) cosh(n t), A&S 9.6.24."""
    # For small x the integrand is still large far from zero: the range grows with log(1 / x).
    safe = jnp.where(x > _CLOSE, x, 1.0)
    reach = jnp.arccosh(1 + 60 / safe)
    points, weights = _trapezoid(400)
    t = reach[..., None] * jnp.asarray(points, x.dtype)
    values = jnp.exp(-safe[..., None] * 2 * jnp.sinh(t / 2) ** 2) * jnp.cosh(order * t)
    out = _mean(values, weights) * reach
    close = jnp.where((x > 0) & (x <= _CLOSE), x, 1.0)
    log = jnp.log(close / 2) + np.euler_gamma
    out = jnp.where(
        x > _CLOSE, out, jnp.exp(close) * (1 / close + close / 2 * (log - 0.5) if order else -log)
    )
    return jnp.where(x > 0, out, jnp.where(x == 0, jnp.inf, jnp.nan))


def _y(x: Any, order: int) -> Any:
    """A&S 9.1.22: an oscillating part by quadrature, and a decaying one over t > 0."""
    safe = jnp.where(x > _CLOSE, jnp.minimum(x, _FAR), 1.0)
    # Gauss-Legendre: this integrand is smooth but not periodic.
    nodes, weights = np.polynomial.legendre.leggauss(96)
    theta = jnp.asarray((nodes + 1) * np.pi / 2, x.dtype)
    first = _mean(jnp.sin(safe[..., None] * jnp.sin(theta) - order * theta), weights)
    reach = jnp.arcsinh(60 / safe)
    t = reach[..., None] * jnp.asarray((nodes + 1) / 2, x.dtype)
    growth = 2.0 if order == 0 else jnp.exp(t) - jnp.exp(-t)
    second = _mean(growth * jnp.exp(-safe[..., None] * jnp.sinh(t)), weights) * reach
    out = first - second / np.pi
    close = jnp.where((x > 0) & (x <= _CLOSE), x, 1.0)
    log = jnp.log(close / 2) + np.euler_gamma
    out = jnp.where(
        x > _CLOSE, out, 2 / np.pi * (close / 2 * (log - 0.5) - 1 / close if order else log)
    )
    out = jnp.where(x > _FAR, _far(jnp.maximum(x, _FAR), order, -np.pi / 2), out)
    out = jnp.where(x == jnp.inf, 0, out)
    return jnp.where(x > 0, out, jnp.where(x == 0, -jnp.inf, jnp.nan))


rules(
    {
        "special_bessel_j0 prims::bessel_j0": lambda x: _j(x, 0),
        "special_bessel_j1 prims::bessel_j1": lambda x: _j(x, 1),
        "special_bessel_y0": lambda x: _y(x, 0),
        "special_bessel_y1": lambda x: _y(x, 1),
        "special_modified_bessel_k0": lambda x: jnp.exp(-x) * _k(x, 0),
        "special_modified_bessel_k1": lambda x: jnp.exp(-x) * _k(x, 1),
        "special_scaled_modified_bessel_k0": lambda x: _k(x, 0),
        "special_scaled_modified_bessel_k1": lambda x: _k(x, 1),
        "special_spherical_bessel_j0 prims::spherical_bessel_j0": lambda x: jnp.where(
            jnp.isinf(x), 0.0, sine_ratio(jnp.where(jnp.isinf(x), 1.0, x))
        ),
    },
    cast=True,
)

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


def _shifted(polynomial: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, n: polynomial(2 * jnp.asarray(x) - 1, n)


for _name, _polynomial in _POLYNOMIALS.items():
    rule(f"special_{_name}")(_polynomial)
    if _name.startswith("chebyshev"):
        rule(f"special_shifted_{_name}")(_shifted(_polynomial))


@rule("special_erfcx", cast=True)
def _erfcx(x: Any) -> Any:
    """``exp(x^2) erfc(x)``, and where that overflows its asymptotic series."""
    bound = 25.0 if x.dtype == jnp.float64 else 9.0
    is_far = x > bound
    near, far = jnp.where(is_far, 0, x), jnp.where(is_far, x, bound)
    z = 0.5 / far**2
    term = total = jnp.ones_like(z)
    for k in range(1, 8):
        term = term * -(2 * k - 1) * z
        total = total + term
    series = total / (far * jnp.sqrt(jnp.pi).astype(x.dtype))
    return jnp.where(is_far, series, jnp.exp(near * near) * special.erfc(near))
