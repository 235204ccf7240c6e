"""Fourier transforms with torch's normalisation codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from functx.compat._lowering._table import rule

_NO_SCALE, _BY_ROOT, _BY_N = 0, 1, 2


def _scale(x: Any, count: int, mode: int) -> Any:
    if mode == _NO_SCALE:
        return x
    return x / (count**0.5 if mode == _BY_ROOT else count)


def _count(x: Any, dims: Sequence[int]) -> int:
    return int(np.prod([x.shape[d] for d in dims]))


@rule("_fft_c2c")
def _c2c(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Any:
    dims = tuple(dims)
    n = _count(x, dims)
    out = jnp.fft.fftn(x, axes=dims) if forward else jnp.fft.ifftn(x, axes=dims) * n
    return _scale(out, n, normalization)


@rule("_fft_r2c")
def _r2c(x: Any, dims: Sequence[int], normalization: int, onesided: bool) -> Any:
    dims = tuple(dims)
    out = jnp.fft.rfftn(x, axes=dims) if onesided else jnp.fft.fftn(x, axes=dims)
    return _scale(out, _count(x, dims), normalization)


@rule("_fft_c2r")
def _c2r(x: Any, dims: Sequence[int], normalization: int, last: int) -> Any:
    dims = tuple(dims)
    sizes = [x.shape[d] for d in dims[:-1]] + [last]
    n = int(np.prod(sizes))
    return _scale(jnp.fft.irfftn(x, s=sizes, axes=dims) * n, n, normalization)
