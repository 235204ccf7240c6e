"""Special functions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.scipy import special

from functx.compat._lowering._table import rule

_FUNCTIONS: dict[str, Any] = {
    "i0": special.i0,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_ndtri": special.ndtri,
    "special_log_ndtr": special.log_ndtr,
    "special_ndtr": special.ndtr,
    "special_entr": special.entr,
    "igamma": special.gammainc,
    "igammac": special.gammaincc,
    "special_zeta": special.zeta,
    "special_erfcx": lambda x: jnp.exp(x * x) * special.erfc(x),
}
for _name, _fn in _FUNCTIONS.items():
    rule(_name, cast=True)(_fn)


@rule("polygamma")
def _polygamma(n: int, x: Any) -> Any:
    return special.digamma(x) if n == 0 else special.polygamma(n, x)


@rule("mvlgamma")
def _mvlgamma(x: Any, p: int) -> Any:
    return special.multigammaln(x, p)
