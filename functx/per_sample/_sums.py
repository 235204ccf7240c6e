"""Norms of rows and weighted sums of rows, without a copy of the rows.

Rows are gradients of ``c`` examples by one leaf, ``(c, *leaf.shape)``, in whatever order of
dimensions the backward pass left them in memory. A product of matrices wants them flat: flattened
in the order of the memory, they need not be copied, and the sum is kept in that order too.
"""

from __future__ import annotations

import math

import torch

from functx import _torch


def norm_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The real dtype in which a norm of ``dtype`` numbers is accumulated, float32 at least."""
    real = dtype.to_real() if dtype.is_complex else dtype
    least = torch.promote_types(real, torch.float32)
    return least if wanted is None else torch.promote_types(least, wanted)


def squared_norms(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The squared norm of each row, of shape ``(c,)``."""
    if rows.shape[1:].numel() == 0:
        return rows.new_zeros(len(rows), dtype=dtype)
    flat = _flat(rows, _memory_order(rows))
    # In blocks: the kernel adds a row up in sequence, which loses digits over a million numbers.
    blocks = flat.view(len(flat), math.gcd(flat.shape[1], 64), -1)
    norms = torch.linalg.vector_norm(blocks, dim=2, dtype=_as_kind(dtype, flat))
    return norms.square().sum(1)


class WeightedSum:
    """The sum of weighted rows, of shape ``leaf.shape``.

    Args:
        shape: Of the leaf.
        dtype: To add up in.
        device: Of the leaf.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._order: list[int] | None = None  # of the dimensions in memory
        self._sum: torch.Tensor | None = None  # in that order

    def add(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds the rows, weighted by numbers of shape ``(c,)``."""
        if self._order is None:
            self._order = _memory_order(rows)
        flat = _flat(rows, self._order).to(self._dtype)
        weights = weights.to(self._dtype)
        if self._sum is None:
            shape = [self._shape[dim] for dim in self._order]
            if _torch.transforming() or flat.requires_grad or weights.requires_grad:
                self._sum = (weights @ flat).view(shape)
                return
            self._sum = torch.zeros(shape, dtype=self._dtype, device=self._device)
        total = self._sum.view(-1)
        if _torch.transforming() or any(t.requires_grad for t in (total, flat, weights)):
            self._sum = (total + weights @ flat).view_as(self._sum)
        elif len(flat) == 1:
            total.addcmul_(flat[0], weights)
        else:
            total.addmv_(flat.t(), weights)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """The sum as a matrix, its dimensions in order, to add to in place."""
        if self._sum is None or self._order is None:
            self._order = list(range(len(self._shape)))
            self._sum = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        if self._order != sorted(self._order):
            # Both kinds of gradients came, in different orders of dimensions.
            self._sum = self.total(self._dtype)
            self._order = list(range(len(self._shape)))
        return self._sum.view(rows, columns)

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum, in the leaf's order of dimensions; zeros if nothing was added."""
        if self._sum is None or self._order is None:
            return torch.zeros(self._shape, dtype=dtype, device=self._device)
        back = [self._order.index(dim) for dim in range(len(self._order))]
        return self._sum.permute(back).contiguous().to(dtype)


def _memory_order(rows: torch.Tensor) -> list[int]:
    """The dimensions of a row, outermost in memory first."""
    strides = rows.stride()[1:]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _flat(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Rows as a matrix, their dimensions in a given order."""
    return rows.permute(0, *(dim + 1 for dim in order)).reshape(len(rows), -1)


def _as_kind(dtype: torch.dtype, like: torch.Tensor) -> torch.dtype:
    """``dtype``, or the complex one of its precision where ``like`` is complex."""
    return dtype.to_complex() if like.is_complex() else dtype
