"""Fourier transforms with torch's normalisation codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from functx.compat._to_jax.rules.table import rule

# For each of torch's codes, the power of the number of elements that scales the result: none, one
# over its root, and one over the number.
_POWERS = (0, -0.5, -1)


def _scaled(x: Any, sizes: Sequence[int], normalization: int) -> Any:
    return x * float(np.prod(sizes)) ** _POWERS[normalization] if normalization else x


@rule("_fft_c2c")
def _c2c(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Any:
    transform, norm = (jnp.fft.fftn, "backward") if forward else (jnp.fft.ifftn, "forward")
    out = transform(x, axes=tuple(dims), norm=norm)
    return _scaled(out, [x.shape[d] for d in dims], normalization)


@rule("_fft_r2c")
def _r2c(x: Any, dims: Sequence[int], normalization: int, onesided: bool) -> Any:
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return _scaled(transform(x, axes=tuple(dims)), [x.shape[d] for d in dims], normalization)


@rule("_fft_c2r")
def _c2r(x: Any, dims: Sequence[int], normalization: int, last: int) -> Any:
    sizes = [*(x.shape[d] for d in dims[:-1]), last]
    out = jnp.fft.irfftn(x, s=sizes, axes=tuple(dims), norm="forward")
    return _scaled(out, sizes, normalization)
