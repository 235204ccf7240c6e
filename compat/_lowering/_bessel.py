"""Bessel and Airy functions of real arguments.

Sources: power and asymptotic series of Abramowitz and Stegun, chapters 9 and 10, and integral
representations evaluated by quadrature that converges exponentially for periodic integrands (the
trapezoidal rule).  Accurate to float32 rounding over the range in which torch's kernels are.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.scipy import special

from functx.compat._lowering._table import rule

rule("special_modified_bessel_i0", cast=True)(special.i0)
rule("special_modified_bessel_i1", cast=True)(special.i1)

_POINTS = 128


def _trapezoid(x: Any, integrand: Any) -> Any:
    """The mean over [0, pi] of a function that is smooth, even and periodic in 2 pi."""
    theta = jnp.asarray(np.linspace(0, np.pi, _POINTS + 1), x.dtype)
    weights = np.ones(_POINTS + 1)
    weights[[0, -1]] = 0.5
    values = integrand(x[..., None], theta)
    return jnp.sum(values * jnp.asarray(weights / _POINTS, x.dtype), -1)


@rule("prims::bessel_j0", "special_bessel_j0", cast=True)
def _j0(x: Any) -> Any:
    return _trapezoid(x, lambda x, t: jnp.cos(x * jnp.sin(t)))


@rule("prims::bessel_j1", "special_bessel_j1", cast=True)
def _j1(x: Any) -> Any:
    return _trapezoid(x, lambda x, t: jnp.cos(t - x * jnp.sin(t)))


@rule("prims::spherical_bessel_j0", "special_spherical_bessel_j0", cast=True)
def _spherical_j0(x: Any) -> Any:
    return jnp.where(jnp.isinf(x), 0.0, jnp.sinc(x / np.pi))


def _k_scaled(x: Any, order: int) -> Any:
    """exp(x) K_n(x) = integral over t > 0 of exp(-x (cosh t - 1)) cosh(n t), A&S 9.6.24."""
    # Below the smallest x the integrand is still alive far out: the range grows with log(1 / x).
    safe = jnp.where(x > 0, x, 1.0)
    reach = jnp.arccosh(1 + 60 / safe)
    u = jnp.asarray(np.linspace(0, 1, 401), x.dtype)
    t = reach[..., None] * u
    weights = np.ones(401)
    weights[[0, -1]] = 0.5
    values = jnp.exp(-safe[..., None] * 2 * jnp.sinh(t / 2) ** 2) * jnp.cosh(order * t)
    out = jnp.sum(values * jnp.asarray(weights / 400, x.dtype), -1) * reach
    return jnp.where(x > 0, out, jnp.where(x == 0, jnp.inf, jnp.nan))


@rule("special_scaled_modified_bessel_k0", cast=True)
def _k0e(x: Any) -> Any:
    return _k_scaled(x, 0)


@rule("special_scaled_modified_bessel_k1", cast=True)
def _k1e(x: Any) -> Any:
    return _k_scaled(x, 1)


@rule("special_modified_bessel_k0", cast=True)
def _k0(x: Any) -> Any:
    return jnp.exp(-x) * _k_scaled(x, 0)


@rule("special_modified_bessel_k1", cast=True)
def _k1(x: Any) -> Any:
    return jnp.exp(-x) * _k_scaled(x, 1)


def _y(x: Any, order: int) -> Any:
    """A&S 9.1.22: an oscillating part by quadrature, and a decaying one over t > 0."""
    safe = jnp.where(x > 0, x, 1.0)
    # Gauss-Legendre: this integrand is smooth but not periodic.
    nodes, weights = np.polynomial.legendre.leggauss(96)
    theta = jnp.asarray((nodes + 1) * np.pi / 2, x.dtype)
    oscillating = jnp.sin(safe[..., None] * jnp.sin(theta) - order * theta)
    first = jnp.sum(oscillating * jnp.asarray(weights / 2, x.dtype), -1)
    reach = jnp.arcsinh(60 / safe)
    t = reach[..., None] * jnp.asarray((nodes + 1) / 2, x.dtype)
    decay = jnp.exp(-safe[..., None] * jnp.sinh(t))
    growth = 2.0 if order == 0 else jnp.exp(t) - jnp.exp(-t)
    second = jnp.sum(growth * decay * jnp.asarray(weights / 2, x.dtype), -1) * reach
    out = first - second / np.pi
    return jnp.where(x > 0, out, jnp.where(x == 0, -jnp.inf, jnp.nan))


@rule("special_bessel_y0", cast=True)
def _y0(x: Any) -> Any:
    return _y(x, 0)


@rule("special_bessel_y1", cast=True)
def _y1(x: Any) -> Any:
    return _y(x, 1)
