"""Norms and weighted sums of per-example gradients, whole or by their factors; stacked results.

The gradients of ``c`` examples by one leaf are rows, of shape ``(c, *leaf.shape)``. The backward
pass leaves the dimensions of a row in any order in memory. A product of matrices wants rows flat:
flattened in the order of the memory, they need not be copied.

NOTE [factors]
The gradient of a weight that is used in a product ``a @ w`` is ``aᵀ b`` for each example: ``a`` is
the input of the product, of shape ``(T, m)``, and ``b`` the cotangent of its output, ``(T, n)``.
Where ``T`` is small against ``m`` and ``n``, the factors have far fewer numbers:

- the squared norm is the sum over ``t`` and ``s`` of ``(a_t · a_s) (b_t · b_s)``, for ``T = 1``
  simply ``|a|² |b|²`` (Goodfellow, Efficient per-example gradient computations, 2015);
- the weighted sum over examples is one product of matrices, that of an ordinary backward pass
  (book-keeping: Bu et al., Differentially private optimization at small cost, 2023).

An embedding's gradient is the product with a one-hot ``a``, given by its indices. A weight used
several times has several pairs, and its norm takes the products of every two.

NOTE [cancellation]
The sum over ``t`` and ``s`` has terms of both signs, where the sum of squares has not: rounded, it
loses what they cancel. With more than one ``t`` it is taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functx import _torch, _tree
from functx.per_sample._batch import Batch

# Factors are kept where they are this many times smaller than the product.
_WORTH = 4


@dataclass(frozen=True)
class Factor:
    """One side of a product."""

    values: torch.Tensor  # of shape (c, T, size); of a one-hot factor the indices, (c, T)
    size: int  # rows or columns of the product

    @property
    def one_hot(self) -> bool:
        """Whether `values` are indices."""
        return not self.values.is_floating_point()


Term = tuple[Factor, Factor]


@dataclass(frozen=True)
class Factored:
    """Rows that are not computed: sums of products, ``(c, *shape)``, by their factors."""

    terms: Sequence[Term]
    shape: torch.Size


Rows = torch.Tensor | Factored


def worth(inner: int, rows: int, columns: int) -> bool:
    """Whether to keep factors ``(inner, rows)`` and ``(inner, columns)`` instead of the product."""
    return _WORTH * inner * (rows + columns) < rows * columns


def product(terms: Sequence[Term]) -> torch.Tensor:
    """What the factors stand for, of shape ``(c, m, n)``."""
    total = _product(*terms[0])
    for term in terms[1:]:
        total = total + _product(*term)
    return total


def _product(left: Factor, right: Factor) -> torch.Tensor:
    if right.one_hot:
        return _product(right, left).mT
    if not left.one_hot:
        return left.values.mT @ right.values
    rows = right.values.new_zeros(len(right.values), left.size, right.size)
    index = left.values[:, :, None].expand(-1, -1, right.size)
    return rows.scatter_add_(1, index, right.values)


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
    # In blocks: the kernel adds a row up in sequence, which loses digits over a million numbers.
    blocks = flat.view(len(flat), math.gcd(flat.shape[1], 64), -1)
    kind = dtype.to_complex() if flat.is_complex() else dtype
    return torch.linalg.vector_norm(blocks, dim=2, dtype=kind).square().sum(1)


def _squared_norms_of_terms(terms: Sequence[Term], dtype: torch.dtype) -> torch.Tensor:
    if len(terms) == 1 and terms[0][0].values.shape[1] == 1:
        squares = [
            factor.values.new_ones(len(factor.values), dtype=dtype)
            if factor.one_hot
            else squared_norms(factor.values, dtype)
            for factor in terms[0]
        ]
        return squares[0] * squares[1]
    total = torch.zeros((), dtype=torch.float64, device=terms[0][0].values.device)
    for number, (left, right) in enumerate(terms):
        for other, (left2, right2) in enumerate(terms[: number + 1]):
            both = (_gram(left, left2) * _gram(right, right2)).sum((1, 2))
            total = total + (both if other == number else 2 * both)
    return total.clamp_min(0).to(dtype)


def _gram(one: Factor, other: Factor) -> torch.Tensor:
    """Products of the rows of two factors, of shape ``(c, T1, T2)``, see NOTE [cancellation]."""
    if one.one_hot and other.one_hot:
        return (one.values[:, :, None] == other.values[:, None, :]).double()
    if one.one_hot:
        return _gram(other, one).mT
    if other.one_hot:
        index = other.values[:, None, :].expand(-1, one.values.shape[1], -1)
        return one.values.gather(2, index).double()
    return one.values.double() @ other.values.double().mT


class WeightedSum:
    """The sum of weighted rows of one leaf, in a dtype."""

    def __init__(self, leaf: torch.Tensor, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = leaf.shape, leaf.device, dtype
        self._total: torch.Tensor | None = None

    def add(self, rows: Rows, weights: torch.Tensor, start: int = 0, stop: int = -1) -> None:
        """Add rows, weighted by numbers of shape ``(c,)``; those from ``start`` to ``stop`` only.

        Either all of them are added, or, where memory runs out, none.
        """
        part = slice(start, len(weights) if stop < 0 else stop)
        weights = weights[part].to(self._dtype)
        if isinstance(rows, Factored):
            terms = [
                (Factor(left.values[part], left.size), Factor(right.values[part], right.size))
                for left, right in rows.terms
            ]
            if not weights.requires_grad:
                self._add_terms(terms, weights)
                return
            rows = product(terms).reshape(-1, *self._shape)
        else:
            rows = rows[part]
        total = self._total
        order = _memory_order(rows[0] if total is None else total)
        flat = _flat(rows, order).to(self._dtype)
        if total is not None and not followed([total, flat, weights]):
            total.permute(order).view(-1).addmv_(flat.t(), weights)
            return
        added = (weights @ flat).view([self._shape[dim] for dim in order])
        added = added.permute([order.index(dim) for dim in range(len(order))])
        self._total = added if total is None else total + added

    def _add_terms(self, terms: Sequence[Term], weights: torch.Tensor) -> None:
        total, added = self.total(), []
        matrix = total.view(terms[0][0].size, terms[0][1].size)
        for left, right in terms:
            target = matrix
            if right.one_hot:
                left, right, target = right, left, matrix.t()
            values = left.values if left.one_hot else left.values.to(self._dtype).contiguous()
            scaled = right.values.to(self._dtype) * weights.view(-1, 1, 1)
            added.append((target, left.one_hot, values, scaled.flatten(0, 1)))
        # From here on nothing is allocated.
        for target, one_hot, values, scaled in added:
            if one_hot:
                target.index_add_(0, values.flatten(), scaled)
            else:
                target.addmm_(values.flatten(0, 1).t(), scaled)
        self._total = total

    def total(self) -> torch.Tensor:
        """The sum, contiguous; zeros if nothing was added."""
        if self._total is None:
            return torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return self._total.contiguous()


def _memory_order(row: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, outermost in memory first."""
    strides = row.stride()
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _flat(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Rows as a matrix, their dimensions in a given order."""
    return rows.permute(0, *(dim + 1 for dim in order)).reshape(len(rows), rows.shape[1:].numel())


def followed(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether something differentiates or traces what is made of tensors."""
    return _torch.transforming() or any(leaf.requires_grad for leaf in leaves)


class Stack:
    """Pytrees of tensors with leading dimension ``c``, one a chunk, made one of ``B``.

    Rows are copied to their place at once, so that chunks and result are not alive together; unless
    something differentiates or traces the result, which could not follow the copies. The place
    follows from the chunk alone: a chunk that is put twice is there once.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[torch.Tensor]] = {}  # by the position of their first example
        self._reserved: set[int] = set()  # positions of parts with a place for a whole batch
        self._spec: _tree.TreeSpec = None

    def put(self, batch: Batch, tree: Any) -> None:
        """Put the rows of a chunk in their place."""
        leaves, self._spec = _tree.flatten(tree)
        begin, size = batch.whole
        if begin not in self._reserved:
            if batch.start > begin or batch.size == size or followed(leaves):
                self._parts[batch.start] = leaves
                return
            self._parts[begin] = [part.new_empty(size, *part.shape[1:]) for part in leaves]
            self._reserved.add(begin)
        first = batch.start - begin
        for whole, part in zip(self._parts[begin], leaves):
            whole[first : first + batch.size] = part

    def before(self, batch: Batch) -> torch.Tensor:
        """The rows of the only leaf that come before those of a chunk."""
        found = [self._parts[start][0] for start in sorted(self._parts) if start < batch.start]
        return (torch.cat(found) if len(found) > 1 else found[0])[: batch.start]

    def close(self, kept: torch.Tensor | None, size: int, empty: bool) -> Any:
        """All rows; the arguments are those of ``Job.result``.

        Returns:
            The pytree, with zeros where an example does not count.
        """
        columns = list(zip(*(self._parts[start] for start in sorted(self._parts))))
        self._parts = {}
        whole = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in columns]
        if empty:
            whole = [leaf[:0] for leaf in whole]
        if kept is not None:
            whole = [
                leaf.new_zeros(size, *leaf.shape[1:]).index_copy(0, kept.to(leaf.device), leaf)
                for leaf in whole
            ]
        return _tree.unflatten(self._spec, whole)
