"""Norms of rows and weighted sums of rows, without a copy of rows that are long.

Rows are gradients of ``c`` examples by one leaf, ``(c, *leaf.shape)``, in whatever order of
dimensions the backward pass left them in memory. A product of matrices wants them flat: flattened
in the order of the memory, they need not be copied, and the sum is kept in that order too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functx import _torch
from functx.per_sample._factors import Factor, Factored, product, weighted
from functx.per_sample._failure import in_halves
from functx.per_sample._rows import flat_rows, memory_order

# Leaves of fewer numbers go together: below it the call of an operation costs more than a copy.
SMALL = 1024

Rows = torch.Tensor | Factored


def packed(kept: Sequence[Rows | None], groups: Sequence[int]) -> dict[tuple[int, ...], Rows]:
    """Rows by the leaves they are of, those of small leaves side by side.

    Args:
        kept: The rows of each leaf; ``None`` if there are none.
        groups: The group of each leaf; only leaves of one go together.
    """
    blocks: dict[tuple[int, ...], Rows] = {}
    small: dict[tuple[Any, ...], dict[int, torch.Tensor]] = {}
    for leaf, rows in enumerate(kept):
        if rows is None:
            continue
        if isinstance(rows, Factored) or rows.shape[1:].numel() > SMALL:
            blocks[(leaf,)] = rows
        else:
            small.setdefault((groups[leaf], rows.dtype, rows.device), {})[leaf] = rows
    for together in small.values():
        parts = [rows.reshape(len(rows), rows.shape[1:].numel()) for rows in together.values()]
        alone = next(iter(together.values()))
        blocks[tuple(together)] = torch.cat(parts, 1) if len(parts) > 1 else alone
    return blocks


class Sums:
    """Weighted sums of the rows of all leaves.

    Args:
        shapes: Of the leaves.
        dtypes: To add up in.
        devices: Of the leaves.

    Attributes:
        ran_out: Whether memory ran out, and rows were added part by part.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        dtypes: Sequence[torch.dtype],
        devices: Sequence[torch.device],
    ) -> None:
        self._shapes, self._dtypes, self._devices = shapes, dtypes, devices
        self._sums: dict[tuple[int, ...], WeightedSum] = {}
        self.ran_out = False

    def add(self, leaves: tuple[int, ...], rows: Rows, weights: torch.Tensor) -> None:
        """Add rows that `packed` put together, weighted by numbers of shape ``(c,)``."""
        if leaves not in self._sums:
            first = leaves[0]
            count = sum(self._shapes[leaf].numel() for leaf in leaves)
            shape = self._shapes[first] if len(leaves) == 1 else torch.Size([count])
            self._sums[leaves] = WeightedSum(shape, self._dtypes[first], self._devices[first])
        total = self._sums[leaves]
        if isinstance(rows, Factored) and weights.requires_grad:
            rows = product(rows.terms).reshape(-1, *rows.shape)
        if not isinstance(rows, Factored):
            dense = rows
            self.in_halves(lambda a, b: total.add(dense[a:b], weights[a:b]), len(weights))
            return
        for left, right in rows.terms:

            def add(a: int, b: int, left: Factor = left, right: Factor = right) -> None:
                matrix = total.matrix(left.size, right.size)
                weighted([(left.part(a, b), right.part(a, b))], weights[a:b], matrix)

            self.in_halves(add, len(weights))

    def in_halves(self, run: Callable[[int, int], Any], size: int, *take: Any) -> None:
        """As `_failure.in_halves`; it is noted whether memory ran out."""
        self.ran_out = in_halves(run, size, *take) or self.ran_out

    def add_sum(self, leaf: int, total: torch.Tensor) -> None:
        """Add a sum over examples, of the shape of its leaf; kept as it is where it is the first.

        Args:
            leaf: Its number.
            total: Somebody else may hold it: it is not written to.
        """
        if (leaf,) in self._sums:
            self.add((leaf,), total.unsqueeze(0), total.new_ones(1))
            return
        shape, dtype, device = self._shapes[leaf], self._dtypes[leaf], self._devices[leaf]
        self._sums[(leaf,)] = WeightedSum(shape, dtype, device, first=total)

    def add_sums(self, found: dict[int, torch.Tensor]) -> None:
        """As `add_sum`, of several leaves."""
        for leaf, total in found.items():
            self.add_sum(leaf, total)

    def totals(self, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """The sums, one a leaf, of some dtypes; zeros if nothing was added."""
        found: dict[int, torch.Tensor] = {}
        for leaves, one in self._sums.items():
            sizes = [self._shapes[leaf].numel() for leaf in leaves]
            total = one.total(self._dtypes[leaves[0]])
            parts = [total] if len(leaves) == 1 else total.split(sizes)
            for leaf, part in zip(leaves, parts):
                part = part.reshape(self._shapes[leaf])
                found[leaf] = found[leaf] + part if leaf in found else part
        self._sums = {}
        return [
            found.pop(leaf).to(dtype)
            if leaf in found
            else torch.zeros(self._shapes[leaf], dtype=dtype, device=self._devices[leaf])
            for leaf, dtype in enumerate(dtypes)
        ]


class WeightedSum:
    """The sum of weighted rows, of shape ``leaf.shape``.

    Args:
        shape: Of the leaf.
        dtype: To add up in.
        device: Of the leaf.
        first: What to begin with, which is not written to.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        first: torch.Tensor | None = None,
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._order: list[int] | None = None  # of the dimensions in memory
        self._sum: torch.Tensor | None = None  # in that order
        self._first = first

    def _begin(self) -> None:
        """Something is added to what came first."""
        if self._first is not None:
            self._order = list(range(len(self._shape)))
            self._sum = self._first.to(self._dtype, copy=True).contiguous()
            self._first = None

    def add(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds the rows, weighted by numbers of shape ``(c,)``."""
        self._begin()
        if self._order is None:
            self._order = memory_order(rows)
        flat = flat_rows(rows, self._order).to(self._dtype)
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
        self._begin()
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
        if self._first is not None:
            return self._first.to(dtype)
        if self._sum is None or self._order is None:
            return torch.zeros(self._shape, dtype=dtype, device=self._device)
        back = [self._order.index(dim) for dim in range(len(self._order))]
        return self._sum.permute(back).contiguous().to(dtype)
