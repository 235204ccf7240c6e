"""Norms and weighted sums of per-example gradients, from the gradients or from their factors.

The gradients of ``c`` examples with respect to one leaf are called rows, of shape
``(c, *leaf.shape)``. The backward pass leaves the dimensions of a row in any order in memory.
Matrix products need flat rows. Flattened in the order of the memory, they need not be copied.

NOTE [factors]
The gradient of a weight that is used in a product ``a @ w`` is ``aᵀ b`` for each example: ``a`` is
the input of the product, of shape ``(T, m)``, and ``b`` the cotangent of its output, ``(T, n)``.
If ``T`` is small compared with ``m`` and ``n``, the factors have far fewer elements:

- the squared norm is the sum over ``t`` and ``s`` of ``(a_t · a_s) (b_t · b_s)``, which for
  ``T = 1`` is ``|a|² |b|²`` (Goodfellow, Efficient per-example gradient computations, 2015);
- the weighted sum over examples is one matrix product, that of an ordinary backward pass
  (book-keeping: Bu et al., Differentially private optimization at small cost, 2023).

The gradient of an embedding is such a product, with a one-hot ``a``. A weight that is used several
times has several pairs of factors. Its norm is a sum over all pairs of pairs.

NOTE [cancellation]
The sum over ``t`` and ``s`` has terms of both signs, unlike a sum of squares, and cancellation
loses digits. With more than one ``t`` it is computed in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functx.per_sample._chunks import followed

# Keep factors if they are this many times smaller than the product.
_WORTH = 4


@dataclass(frozen=True)
class OneHot:
    """A factor of shape ``(c, T, size)`` with a single 1 in each row, at ``index``."""

    index: torch.Tensor  # of shape (c, T)
    size: int

    @property
    def shape(self) -> torch.Size:
        """The shape of the factor, ``(c, T, size)``."""
        return torch.Size((*self.index.shape, self.size))


Factor = torch.Tensor | OneHot
Term = tuple[Factor, Factor]  # of shape (c, T, m) and (c, T, n); one of them is a tensor


@dataclass(frozen=True)
class Factored:
    """Rows of shape ``(c, *leaf.shape)`` as a sum of products that are not computed."""

    terms: Sequence[Term]
    shape: torch.Size


Rows = torch.Tensor | Factored


def worth(inner: int, rows: int, columns: int) -> bool:
    """Whether to keep factors ``(inner, rows)`` and ``(inner, columns)`` instead of the product."""
    return _WORTH * inner * (rows + columns) < rows * columns


def product(terms: Sequence[Term]) -> torch.Tensor:
    """The sum of the products of factors, of shape ``(c, m, n)``."""
    return functools.reduce(torch.add, (_product(left, right) for left, right in terms))


def _product(left: Factor, right: Factor) -> torch.Tensor:
    if isinstance(right, OneHot):
        return _product(right, left).mT
    if isinstance(left, OneHot):
        rows = right.new_zeros(len(right), left.size, right.shape[2])
        return rows.scatter_add(1, left.index[:, :, None].expand_as(right), right)
    return left.mT @ right


def _gram(one: Factor, other: Factor) -> torch.Tensor:
    """Inner products of the rows of two factors, of shape ``(c, T1, T2)``; NOTE [cancellation]."""
    if isinstance(one, OneHot):
        if isinstance(other, OneHot):
            return (one.index[:, :, None] == other.index[:, None]).double()
        return _gram(other, one).mT
    if isinstance(other, OneHot):
        places = other.index[:, None].expand(-1, one.shape[1], -1)
        return one.gather(2, places).double()
    return one.double() @ other.double().mT


def norm_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The real dtype in which a norm of ``dtype`` numbers is accumulated, float32 at least."""
    least = torch.promote_types(dtype.to_real() if dtype.is_complex else dtype, torch.float32)
    return least if wanted is None else torch.promote_types(least, wanted)


def squared_norms(rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """The squared norm of each row, of shape ``(c,)``."""
    if isinstance(rows, Factored):
        return _squared_norms_of_terms(rows.terms, dtype)
    if rows.shape[1:].numel() == 0:
        return rows.new_zeros(len(rows), dtype=dtype)
    flat = _flat(rows, _memory_order(rows[0]))
    # In blocks, because the kernel sums a row sequentially, which loses digits over a million
    # terms.
    blocks = flat.view(len(flat), math.gcd(flat.shape[1], 64), -1)
    kind = dtype.to_complex() if flat.is_complex() else dtype
    return torch.linalg.vector_norm(blocks, dim=2, dtype=kind).square().sum(1)


def _squared_norms_of_terms(terms: Sequence[Term], dtype: torch.dtype) -> torch.Tensor:
    if len(terms) == 1 and terms[0][0].shape[1] == 1:
        factors = (factor for factor in terms[0] if not isinstance(factor, OneHot))
        return functools.reduce(torch.mul, (squared_norms(factor, dtype) for factor in factors))
    total: Any = 0
    for number, (left, right) in enumerate(terms):
        for other, (left2, right2) in enumerate(terms[: number + 1]):
            both = (_gram(left, left2) * _gram(right, right2)).sum((1, 2))
            total = total + (both if other == number else 2 * both)
    return total.clamp_min(0).to(dtype)


class WeightedSum:
    """A sum of weighted rows of one leaf, which is accumulated in one dtype."""

    def __init__(self, leaf: torch.Tensor, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = leaf.shape, leaf.device, dtype
        self._total: torch.Tensor | None = None

    def add(self, rows: torch.Tensor | Term, weights: torch.Tensor) -> None:
        """Add rows, or a term, with weights of shape ``(c,)``. If it raises, nothing was added."""
        weights = weights.to(self._dtype)
        if isinstance(rows, tuple):
            if not weights.requires_grad:
                self._add_product(*rows, weights)
                return
            rows = product([rows]).reshape(-1, *self._shape)
        total = self._total
        order = _memory_order(rows[0] if total is None else total)
        flat = _flat(rows, order).to(self._dtype)
        if total is not None and not followed([total, flat, weights]):
            total.permute(order).view(-1).addmv_(flat.t(), weights)
            return
        with torch.autocast(flat.device.type, enabled=False):
            added = (weights @ flat).view([self._shape[dim] for dim in order])
        added = added.permute([order.index(dim) for dim in range(len(order))])
        self._total = added if total is None else total + added

    def _add_product(self, left: Factor, right: Factor, weights: torch.Tensor) -> None:
        total = self.total()
        matrix = total.view(left.shape[2], -1)
        if isinstance(right, OneHot):
            left, right, matrix = right, left, matrix.t()
        assert isinstance(right, torch.Tensor)
        rows = (right.to(self._dtype) * weights.view(-1, 1, 1)).flatten(0, 1)
        if isinstance(left, OneHot):
            matrix.index_add_(0, left.index.flatten(), rows)
        else:
            matrix.addmm_(left.to(self._dtype).flatten(0, 1).t(), rows)
        self._total = total

    def total(self) -> torch.Tensor:
        """The sum, contiguous; zeros if nothing was added."""
        if self._total is None:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._total.contiguous()


def all_reduced(tensors: list[torch.Tensor], process_group: Any) -> list[torch.Tensor]:
    """Sum tensors over the ranks of a group, with one buffer and one all-reduce per device."""
    if process_group is None or process_group is False:
        return tensors
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "per_sample: got process_group, but torch.distributed is not initialized; call "
            "torch.distributed.init_process_group first"
        )
    group: Any = None if process_group is True else process_group
    if hasattr(group, "get_group"):  # a DeviceMesh of one dimension
        group = group.get_group()
    reduced = list(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        numbers = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        # `cat` promotes several dtypes to one that can represent all of them.
        buffer = torch.cat([tensors[i].detach().reshape(-1) for i in numbers])
        dist.all_reduce(buffer, group=group)
        parts = buffer.split([tensors[i].numel() for i in numbers])
        for i, part in zip(numbers, parts):
            of_dtype = part.real if buffer.is_complex() and not tensors[i].is_complex() else part
            reduced[i] = of_dtype.view(tensors[i].shape).to(tensors[i].dtype)
    return reduced


def _memory_order(row: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, outermost in memory first."""
    strides = row.stride()
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _flat(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Rows as a matrix, with their dimensions permuted to ``order``."""
    return rows.permute(0, *(dim + 1 for dim in order)).reshape(len(rows), rows.shape[1:].numel())
