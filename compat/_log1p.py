"""``log1p`` as XLA computes it, which in float64 is the rational function of Cephes, Moshier 1989.

It holds where ``1 + x`` is in [1/sqrt(2), sqrt(2)].  XLA takes it for more numbers up to jaxlib
0.11.0, with errors of up to 129 ulp that its random numbers have, too; without JAX nothing is to be
matched, and it is taken where it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import metadata

import torch

_ABOVE = (
    4.5270000862445199635215e-5, 4.9854102823193375972212e-1, 6.5787325942061044846969,
    2.9911919328553073277375e1, 6.0949667980987787057556e1, 5.7112963590585538103336e1,
    2.0039553499201281259648e1,
)  # fmt: skip
_BELOW = (
    1.0, 1.5062909083469192043167e1, 8.3047565967967209469434e1, 2.2176239823732856465394e2,
    3.0909872225312059774938e2, 2.1642788614495947685003e2, 6.0118660497603843919306e1,
)  # fmt: skip


def _lowest(version: str | None) -> float:
    """The smallest number for which XLA of that jaxlib takes the rational function."""
    release = [int("".join(filter(str.isdigit, n)) or 0) for n in (version or "1").split(".")[:3]]
    return 1 - math.sqrt(2) if release < [0, 11, 1] else math.sqrt(0.5) - 1


def _jaxlib() -> str | None:
    try:
        return metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        return None


_LOWEST = _lowest(_jaxlib())


def log1p(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + x)`` within 2 ulp of XLA's."""
    if x.dtype != torch.float64:
        return torch.log1p(x)
    square = x * x
    ratio = horner(_ABOVE, x) / horner(_BELOW, x)
    near = x + (-0.5 * square + x * square * ratio)
    return torch.where((x > _LOWEST) & (x < math.sqrt(2) - 1), near, torch.log(1 + x))


def horner(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """A polynomial, the coefficient of its highest power first."""
    result = coefficients[0] * x + coefficients[1]
    for c in coefficients[2:]:
        result = result * x + c
    return result
