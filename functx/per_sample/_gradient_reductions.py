"""What is made of the gradients of a chunk: kept, normed, or clipped and added up.

The factor of an example is known when all its gradients have been normed. Until then those of the
chunk are kept, by their factors where these are known.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from functx import _tree
from functx.per_sample._batch import Batch, Counted
from functx.per_sample._batched_function import BatchedFunction
from functx.per_sample._chunk_gradients import Arrivals, chunk_gradients
from functx.per_sample._chunks import Reduction, out_of_memory
from functx.per_sample._clipping import Groups, Scaling, factors
from functx.per_sample._sums import Factored, Term, WeightedSum, all_reduced, norm_dtype


class Extras(NamedTuple):
    """What was asked for besides the result; ``None`` for the rest.

    Attributes:
        values: The losses, of shape ``(B,)``.
        norms: The norms of the gradients, of shape ``(B,)``; with groups a pytree of such.
        aux: The auxiliary outputs, a pytree of tensors of shape ``(B, ...)``.
    """

    values: torch.Tensor | None = None
    norms: Any = None
    aux: Any = None


class StackedResults(Reduction):
    """Gradients, norms, values and auxiliary outputs of all examples, as far as they are asked for.

    Attributes:
        like: The leaves that are differentiated, for one example: of shape, dtype and device only.
        names: What is asked for: of the fields of `Extras`, and ``"gradients"``.
        keeps: Whether the gradients of a chunk are kept until it has run.
    """

    def __init__(
        self,
        function: BatchedFunction,
        batch: Batch,
        groups: Groups,
        names: list[str],
        *,
        accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.function, self.groups, self.names = function, groups, names
        self.keeps = "gradients" in names
        self.like: list[torch.Tensor] = []
        self._norm_dtype = torch.float32
        leaves, self.spec = _tree.flatten(function.differentiated(batch))
        dims = _tree.leaves(function.differentiated(replace(batch, leaves=batch.dims)))
        for leaf, dim in zip(leaves, dims):
            shape = leaf.shape if dim is None else leaf.shape[:dim] + leaf.shape[dim + 1 :]
            self.like.append(leaf.detach().new_empty(()).expand(shape))
            wanted = norm_dtype(leaf.dtype, accumulation_dtype)
            self._norm_dtype = torch.promote_types(self._norm_dtype, wanted)

    def run(self, batch: Batch) -> dict[str, Any]:
        """Compute one chunk."""
        found = self.pull_back(batch)
        return self.rows(found, self.norms(found, batch.size))

    def result(self, counted: Counted) -> tuple[Any, Extras]:
        """The gradients or else the norms, and what else was asked for."""
        found = self.stack.close(counted)
        return found.pop("gradients" if "gradients" in found else "norms"), Extras(**found)

    def pull_back(self, batch: Batch) -> Arrivals:
        """The gradients of a chunk, some of them kept."""
        whole = "gradients" in self.names
        groups = None if whole and "norms" not in self.names else self.groups.of_leaf
        arrivals = Arrivals(groups, self._norm_dtype, self.keeps, factors=not whole)
        return chunk_gradients(self.function, batch, arrivals)

    def norms(self, found: Arrivals, size: int) -> list[torch.Tensor]:
        """The norms of a chunk, of shape ``(c,)``, one tensor a group."""
        zeros = self.like[0].new_zeros(size, dtype=self._norm_dtype)
        groups = range(len(self.groups.thresholds))
        return [found.squares.get(group, zeros).sqrt() for group in groups]

    def rows(self, found: Arrivals, norms: list[torch.Tensor]) -> dict[str, Any]:
        """What is asked for, of one chunk."""
        rows = {"values": found.values, "norms": self.groups.pack(norms), "aux": found.aux}
        if "gradients" in self.names:
            size, kept = len(found.values), found.kept
            for leaf, like in enumerate(self.like):
                if leaf not in kept:
                    kept[leaf] = like.new_zeros(size, *like.shape)
            rows["gradients"] = _tree.unflatten(self.spec, [kept[leaf] for leaf in sorted(kept)])
        return {name: rows[name] for name in self.names}


class ClippedSum(StackedResults):
    """The sum of all gradients, each times the factor that its norm gives it."""

    def __init__(
        self,
        *args: Any,
        scaling: Scaling,
        accumulation_dtype: torch.dtype | None,
        process_group: Any,
    ) -> None:
        super().__init__(*args, accumulation_dtype=accumulation_dtype)
        self.keeps = True
        self._scaling, self._wanted = scaling, accumulation_dtype
        self._process_group = process_group
        self._sums = [WeightedSum(like, self._dtype_of_sum(like)) for like in self.like]
        # Of the chunk that ran: parts of leaves, with weights.
        self._parts: list[tuple[int, torch.Tensor | Term, torch.Tensor]] = []

    def _dtype_of_sum(self, leaf: torch.Tensor) -> torch.dtype:
        """The dtype to add up in: short ones in float32 unless something else is asked for."""
        if self._wanted is None:
            short = leaf.dtype in (torch.float16, torch.bfloat16)
            return torch.float32 if short else leaf.dtype
        return self._wanted.to_complex() if leaf.is_complex() else self._wanted

    def run(self, batch: Batch) -> dict[str, Any]:
        """Compute one chunk."""
        self._parts = []
        found = self.pull_back(batch)
        norms, of_leaf = self.norms(found, batch.size), self.groups.of_leaf
        weights = [
            factors(self._scaling, norm, threshold, self.function.api)
            for norm, threshold in zip(norms, self.groups.thresholds)
        ]
        for leaf, rows in found.kept.items():
            parts = rows.terms if isinstance(rows, Factored) else [rows]
            self._parts += [(leaf, part, weights[of_leaf[leaf]]) for part in parts]
        return self.rows(found, norms)

    def add(self) -> str | None:
        """Add the chunk that ran to the sums, once more where memory had to be freed first."""
        failure = None
        while self._parts:
            leaf, rows, weights = self._parts.pop()
            add = functools.partial(self._sums[leaf].add, rows, weights)
            if (error := out_of_memory(add)) is not None:
                failure = error
                add()
        return failure

    def result(self, counted: Counted) -> tuple[Any, Extras]:
        """The sum, and what else was asked for."""
        totals = [total.total() for total in self._sums]
        if self._wanted is None:
            totals = [total.to(like.dtype) for total, like in zip(totals, self.like)]
        if counted.empty:
            totals = [torch.zeros_like(total) for total in totals]
        totals = all_reduced(totals, self._process_group)
        return _tree.unflatten(self.spec, totals), Extras(**self.stack.close(counted))
