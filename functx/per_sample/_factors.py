"""Per-example products of matrices by their factors: norms and weighted sums without products.

The gradient of a weight that is used in a product ``a @ w`` is ``aᵀ b`` for each example: ``a``
what came in, of shape ``(T, m)``, and ``b`` the cotangent of what went out, ``(T, n)``. Where ``T``
is small against ``m`` and ``n``, the factors say all there is to know in far fewer numbers:

- the squared norm is the sum over ``t`` and ``s`` of ``(a_t · a_s) (b_t · b_s)``, for ``T = 1``
  simply ``|a|² |b|²`` (Goodfellow, Efficient per-example gradient computations, 2015);
- the weighted sum over examples is one product of matrices, that of an ordinary backward pass
  (book-keeping: Bu et al., Differentially private optimization at small cost, 2023).

An embedding's rows are the product with a one-hot ``a``, held by its indices. A weight used several
times has several pairs, and its norm takes the products of every two.

NOTE [cancellation]
The sum over ``t`` and ``s`` has terms of both signs, where the sum of squares has not: rounded, it
loses what they cancel. With more than one ``t`` it is taken in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from functx.per_sample._rows import norm_dtype, squared_norms

# Factors are kept where they and their products are this many times smaller than the product.
_WORTH = 4


def worth(inner: int, rows: int, columns: int) -> bool:
    """Whether to keep factors ``(inner, rows)`` and ``(inner, columns)`` instead of the product."""
    return _WORTH * inner * (rows + columns) < rows * columns


@dataclass(frozen=True)
class Dense:
    """A factor as it is, of shape ``(c, T, size)``."""

    values: torch.Tensor

    @property
    def size(self) -> int:
        """Rows or columns of the product."""
        return self.values.shape[2]

    def part(self, start: int, stop: int) -> Dense:
        """Of some of the examples."""
        return Dense(self.values[start:stop])


@dataclass(frozen=True)
class OneHot:
    """A factor with a single 1 in each row: its indices, of shape ``(c, T)``."""

    index: torch.Tensor
    size: int

    def part(self, start: int, stop: int) -> OneHot:
        """Of some of the examples."""
        return OneHot(self.index[start:stop], self.size)


Factor = Dense | OneHot
Term = tuple[Factor, Factor]


@dataclass(frozen=True)
class Factored:
    """Gradients of a chunk by one leaf that are products, ``(c, *shape)``, by their factors."""

    terms: Sequence[Term]
    shape: torch.Size


def without(left: Factor, right: Factor, row: int) -> Dense:
    """The right factor of an embedding's product without one of its rows."""
    assert isinstance(left, OneHot)
    assert isinstance(right, Dense)
    return Dense(right.values.masked_fill((left.index == row).unsqueeze(2), 0))


def product(terms: Sequence[Term]) -> torch.Tensor:
    """What the factors stand for, of shape ``(c, m, n)``."""
    return _sum([_product(*term) for term in terms])


def squared_norms_of(terms: Sequence[Term], wanted: torch.dtype) -> torch.Tensor:
    """The squared norm of each example's product, of shape ``(c,)``."""
    if len(terms) == 1 and _inner(terms[0]) == 1:
        left, right = terms[0]
        return _squares(left, wanted) * _squares(right, wanted)
    total = []
    for number, (left, right) in enumerate(terms):
        for other, (left2, right2) in enumerate(terms[: number + 1]):
            both = (_gram(left, left2) * _gram(right, right2)).sum((1, 2))
            total.append(both if other == number else 2 * both)
    return _sum(total).clamp_min(0).to(wanted)


def weighted(terms: Sequence[Term], weights: torch.Tensor, total: torch.Tensor) -> None:
    """Adds the weighted sum of the examples' products to ``total``, of shape ``(m, n)``."""
    for left, right in terms:
        if isinstance(left, OneHot) and isinstance(right, Dense):
            _add_rows(total, left, right, weights)
        elif isinstance(right, OneHot) and isinstance(left, Dense):
            _add_rows(total.t(), right, left, weights)
        elif isinstance(left, Dense) and isinstance(right, Dense):
            one, other = left.values, right.values
            scaled = weights.to(one.dtype).view(-1, 1, 1)
            if one.shape[2] < other.shape[2]:
                one = one * scaled
            else:
                other = other * scaled
            one, other = one.flatten(0, 1).to(total.dtype), other.flatten(0, 1).to(total.dtype)
            total.addmm_(one.t(), other)
        else:
            total.add_(torch.tensordot(weights.to(total.dtype), _product(left, right), 1))


def _add_rows(total: torch.Tensor, index: OneHot, rows: Dense, weights: torch.Tensor) -> None:
    values = rows.values * weights.to(rows.values.dtype).view(-1, 1, 1)
    total.index_add_(0, index.index.flatten(), values.flatten(0, 1).to(total.dtype))


def _inner(term: Term) -> int:
    """The length that a product sums over."""
    left = term[0]
    return (left.values if isinstance(left, Dense) else left.index).shape[1]


def _squares(factor: Factor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(factor, OneHot):
        return factor.index.new_ones(len(factor.index), dtype=dtype)
    return squared_norms(factor.values, norm_dtype(factor.values.dtype, dtype))


def _gram(one: Factor, other: Factor) -> torch.Tensor:
    """Products of the rows of two factors, of shape ``(c, T1, T2)``, see NOTE [cancellation]."""
    if isinstance(one, Dense) and isinstance(other, Dense):
        return one.values.double() @ other.values.double().mT
    if isinstance(one, OneHot) and isinstance(other, OneHot):
        return (one.index[:, :, None] == other.index[:, None, :]).double()
    if isinstance(one, Dense) and isinstance(other, OneHot):
        index = other.index[:, None, :].expand(-1, one.values.shape[1], -1)
        return one.values.gather(2, index).double()
    return _gram(other, one).mT


def _product(left: Factor, right: Factor) -> torch.Tensor:
    if isinstance(left, Dense) and isinstance(right, Dense):
        return left.values.mT @ right.values
    if isinstance(left, OneHot) and isinstance(right, Dense):
        rows = right.values.new_zeros(len(right.values), left.size, right.size)
        index = left.index[:, :, None].expand(-1, -1, right.size)
        return rows.scatter_add_(1, index, right.values)
    return _product(right, left).mT


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
