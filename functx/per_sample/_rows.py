"""Gradients of ``c`` examples by one leaf, ``(c, *leaf.shape)``, as matrices, and their norms.

The backward pass leaves the dimensions of a row in whatever order in memory. A product of matrices
wants rows flat: flattened in the order of the memory, they need not be copied.
"""

from __future__ import annotations

import math

import torch


def norm_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The real dtype in which a norm of ``dtype`` numbers is accumulated, float32 at least."""
    real = dtype.to_real() if dtype.is_complex else dtype
    least = torch.promote_types(real, torch.float32)
    return least if wanted is None else torch.promote_types(least, wanted)


def squared_norms(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The squared norm of each row, of shape ``(c,)``."""
    if rows.shape[1:].numel() == 0:
        return rows.new_zeros(len(rows), dtype=dtype)
    flat = flat_rows(rows, memory_order(rows))
    # In blocks: the kernel adds a row up in sequence, which loses digits over a million numbers.
    blocks = flat.view(len(flat), math.gcd(flat.shape[1], 64), -1)
    norms = torch.linalg.vector_norm(blocks, dim=2, dtype=_as_kind(dtype, flat))
    return norms.square().sum(1)


def memory_order(rows: torch.Tensor) -> list[int]:
    """The dimensions of a row, outermost in memory first."""
    strides = rows.stride()[1:]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def flat_rows(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Rows as a matrix, their dimensions in a given order."""
    return rows.permute(0, *(dim + 1 for dim in order)).reshape(len(rows), rows.shape[1:].numel())


def _as_kind(dtype: torch.dtype, like: torch.Tensor) -> torch.dtype:
    """``dtype``, or the complex one of its precision where ``like`` is complex."""
    return dtype.to_complex() if like.is_complex() else dtype
