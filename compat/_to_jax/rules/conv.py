"""Convolutions in torch's layout, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functx.compat._to_jax.rules.table import rule


def _tuple(x: Sequence[int], n: int) -> tuple[int, ...]:
    return tuple(x) * n if len(x) == 1 else tuple(x)


@rule("convolution", "_convolution")
def _convolution(
    x: Any, weight: Any, bias: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, *_: Any,
) -> Any:  # fmt: skip
    n = weight.ndim - 2
    if x.ndim == n + 1:
        settings = (stride, padding, dilation, transposed, output_padding, groups)
        return _convolution(x[None], weight, bias, *settings)[0]
    stride, padding, dilation = _tuple(stride, n), _tuple(padding, n), _tuple(dilation, n)
    edges = [(p, p) for p in padding]
    between = (1,) * n
    if transposed:
        # The adjoint of a convolution is one of the input with gaps: the kernel is flipped in
        # space, with in and out swapped within each group.
        c_in, c_out, *kernel = weight.shape
        weight = jnp.flip(weight, tuple(range(2, n + 2)))
        weight = weight.reshape(groups, c_in // groups, c_out, *kernel)
        weight = jnp.swapaxes(weight, 1, 2).reshape(groups * c_out, c_in // groups, *kernel)
        reach = [d * (k - 1) - p for k, p, d in zip(kernel, padding, dilation)]
        edges = [(r, r + o) for r, o in zip(reach, _tuple(output_padding, n))]
        stride, between = between, stride
    out = lax.conv_general_dilated(
        x,
        weight,
        stride,
        edges,
        lhs_dilation=between,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=lax.Precision.HIGHEST,
    )
    return out if bias is None else out + bias.reshape(-1, *(1,) * n)


@rule("convolution_backward")
def _convolution_backward(g: Any, x: Any, weight: Any, bias_sizes: Any, *rest: Any) -> Any:
    *settings, output_mask = rest
    _, pull = jax.vjp(lambda x, w: _convolution(x, w, None, *settings), x, weight)
    gradients = (*pull(g), jnp.sum(g, (0, *range(2, g.ndim))))
    return tuple(d if wanted else None for d, wanted in zip(gradients, output_mask))
