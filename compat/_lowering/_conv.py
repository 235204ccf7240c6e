"""Convolutions in torch's layout, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._lowering._table import rule

_SPATIAL = "DHW"


def _dims(n: int) -> tuple[str, str, str]:
    spatial = _SPATIAL[3 - n :]
    return "NC" + spatial, "OI" + spatial, "NC" + spatial


def _tuple(x: Sequence[int], n: int) -> tuple[int, ...]:
    return tuple(x) * n if len(x) == 1 else tuple(x)


@rule("convolution", "_convolution", "convolution_overrideable")
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *_: Any,
) -> Any:
    n = weight.ndim - 2
    unbatched = x.ndim == n + 1
    x = x[None] if unbatched else x
    stride, padding, dilation = _tuple(stride, n), _tuple(padding, n), _tuple(dilation, n)
    if transposed:
        out = _transposed(x, weight, stride, padding, dilation, _tuple(output_padding, n), groups)
    else:
        out = lax.conv_general_dilated(
            x,
            weight,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            dimension_numbers=_dims(n),
            feature_group_count=groups,
            precision=lax.Precision.HIGHEST,
        )
    if bias is not None:
        out = out + bias.reshape(-1, *(1,) * n)
    return out[0] if unbatched else out


def _transposed(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """The adjoint of a convolution, as a convolution of the stride-dilated input.

    ``weight`` is (in, out / groups, *kernel); flipped in space and with in and out swapped within
    each group it is the kernel of that convolution.
    """
    n = weight.ndim - 2
    c_in, c_out, *kernel = weight.shape
    w = jnp.flip(weight, tuple(range(2, n + 2)))
    w = w.reshape(groups, c_in // groups, c_out, *kernel)
    w = jnp.swapaxes(w, 1, 2).reshape(groups * c_out, c_in // groups, *kernel)
    edges = [
        (d * (k - 1) - p, d * (k - 1) - p + o)
        for k, p, d, o in zip(kernel, padding, dilation, output_padding)
    ]
    return lax.conv_general_dilated(
        x,
        w,
        (1,) * n,
        edges,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=_dims(n),
        feature_group_count=groups,
        precision=lax.Precision.HIGHEST,
    )


@rule("convolution_backward")
def _convolution_backward(
    g: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    _, pull = jax.vjp(lambda x, w: _convolution(x, w, None, *settings), x, weight)
    dx, dw = pull(g)
    db = jnp.sum(g, (0, *range(2, g.ndim)))
    return tuple(d if wanted else None for d, wanted in zip((dx, dw, db), output_mask))


@rule("im2col", context=True)
def _im2col(
    x: Any, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int],
    stride: Sequence[int], *, ctx: Any = None,
) -> Any:  # fmt: skip
    if x.size == 0:
        return jnp.zeros(ctx.shape, ctx.dtype)
    unbatched = x.ndim == 3
    x = x[None] if unbatched else x
    patches = lax.conv_general_dilated_patches(
        x,
        tuple(kernel),
        tuple(stride),
        [(p, p) for p in padding],
        rhs_dilation=tuple(dilation),
        precision=lax.Precision.HIGHEST,
    )
    out = patches.reshape(*patches.shape[:2], -1)
    return out[0] if unbatched else out


@rule("col2im")
def _col2im(
    x: Any, size: Sequence[int], kernel: Sequence[int], dilation: Sequence[int],
    padding: Sequence[int], stride: Sequence[int],
) -> Any:  # fmt: skip
    unbatched = x.ndim == 2
    x = x[None] if unbatched else x
    channels = x.shape[1] // (kernel[0] * kernel[1])
    image = jax.ShapeDtypeStruct((x.shape[0], channels, *size), x.dtype)
    (out,) = jax.linear_transpose(lambda y: _im2col(y, kernel, dilation, padding, stride), image)(x)
    return out[0] if unbatched else out
