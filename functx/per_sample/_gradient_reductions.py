"""Reductions of the gradients of a chunk: stack them, take norms, or clip and sum them.

To clip, the norms of all gradients of an example are needed first. Until then the gradients of the
chunk are kept, represented by factors where possible (NOTE [factors] of `_sums`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from functx._core import tree
from functx.per_sample._batch import Batch, Counted, shape_of_one, stacked
from functx.per_sample._batched_function import BatchedFunction
from functx.per_sample._chunk_gradients import Arrivals, chunk_gradients
from functx.per_sample._chunks import Reduction, out_of_memory
from functx.per_sample._clipping import Groups, Scaling, factors
from functx.per_sample._sums import Factored, Rows, Term, WeightedSum, all_reduced, norm_dtype


class Extras(NamedTuple):
    """What the caller requested in addition to the result; the other fields are ``None``.

    Attributes:
        values: The losses, of shape ``(B,)``.
        norms: The norms of the gradients, of shape ``(B,)``; with groups, a pytree of such tensors.
        aux: The auxiliary outputs, a pytree of tensors of shape ``(B, ...)``.
    """

    values: torch.Tensor | None = None
    norms: Any = None
    aux: Any = None


class StackedResults(Reduction):
    """Stacks the gradients, norms, values and auxiliary outputs of all examples, as requested.

    Attributes:
        like: For each differentiated leaf, a tensor with its shape for one example, its dtype and
            its device.
    """

    def __init__(
        self,
        function: BatchedFunction,
        batch: Batch,
        groups: Groups,
        names: list[str],
        *,
        gradients: bool = False,
        accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(function.func, function.chunks.randomness)
        self.function, self.groups = function, groups
        self._names, self._gradients = names, gradients
        self.like: list[torch.Tensor] = []
        self._norm_dtype = torch.float32
        self.spec = tree.flatten(function.differentiated(batch))[1]
        leaves, dims = map(batch.of_differentiated, (batch.leaves, batch.dims))
        for leaf, dim in zip(leaves, dims, strict=True):
            self.like.append(leaf.detach().new_empty(()).expand(shape_of_one(leaf, dim)))
            wanted = norm_dtype(leaf.dtype, accumulation_dtype)
            self._norm_dtype = torch.promote_types(self._norm_dtype, wanted)

    def run(self, batch: Batch) -> dict[str, Any]:
        """Compute one chunk."""
        rows, gradients, _ = self.pull_back(batch, keeps_gradients=self._gradients)
        if self._gradients:
            rows["gradients"] = [
                gradients[leaf] if leaf in gradients else like.new_zeros(batch.size, *like.shape)
                for leaf, like in enumerate(self.like)
            ]
        return rows

    def result(self, counted: Counted) -> Any:
        """The gradients or the norms, and what else was requested."""
        found = self._closed(counted)
        return _with_extras(found.pop("gradients" if self._gradients else "norms"), found)

    def _closed(self, counted: Counted) -> dict[str, Any]:
        """The stacked rows, in the structures that users expect."""
        found = self.stack.close(counted)
        if "gradients" in found:
            found["gradients"] = stacked(self.spec, found["gradients"])
        if "norms" in found:
            found["norms"] = self.groups.pack(found["norms"])
        if "aux" in found:
            found["aux"] = stacked(self.structure, found["aux"])
        return found

    def pull_back(
        self, batch: Batch, keeps_gradients: bool
    ) -> tuple[dict[str, Any], dict[int, Rows], list[torch.Tensor]]:
        """For one chunk: requested fields of `Extras`, gradients by leaf, and norms by group."""
        groups = None if self._gradients and "norms" not in self._names else self.groups.of_leaf
        arrivals = Arrivals(groups, self._norm_dtype, keeps_gradients, factors=not self._gradients)
        found = chunk_gradients(self.function, batch, arrivals)
        self.structure = found.structure
        zeros = self.like[0].new_zeros(batch.size, dtype=self._norm_dtype)
        numbers = range(len(self.groups.thresholds))
        norms = [found.squares.get(group, zeros).sqrt() for group in numbers]
        rows = {"values": found.values, "norms": norms, "aux": found.aux}
        return {name: rows[name] for name in self._names}, found.gradients, norms


class ClippedSum(StackedResults):
    """Sums the gradients of all examples, each multiplied by a factor that depends on its norm."""

    def __init__(
        self, *args: Any, scaling: Scaling, accumulation_dtype: Any, process_group: Any
    ) -> None:
        super().__init__(*args, accumulation_dtype=accumulation_dtype)
        self._scaling, self._wanted = scaling, accumulation_dtype
        self._process_group = process_group
        self._sums = [WeightedSum(like, self._dtype_of_sum(like)) for like in self.like]
        # The gradients of the chunk that ran: number of the leaf, rows or a term, weights.
        self._parts: list[tuple[int, torch.Tensor | Term, torch.Tensor]] = []

    def _dtype_of_sum(self, leaf: torch.Tensor) -> torch.dtype:
        """The dtype of the sum: float32 for half precision, unless the caller requested another."""
        if self._wanted is None:
            short = leaf.dtype in (torch.float16, torch.bfloat16)
            return torch.float32 if short else leaf.dtype
        return self._wanted.to_complex() if leaf.is_complex() else self._wanted

    def run(self, batch: Batch) -> dict[str, Any]:
        """Compute one chunk."""
        self._parts = []
        rows, gradients, norms = self.pull_back(batch, keeps_gradients=True)
        weights = [
            factors(self._scaling, norm, threshold, self.function.api)
            for norm, threshold in zip(norms, self.groups.thresholds)
        ]
        for leaf, found in gradients.items():
            parts = found.terms if isinstance(found, Factored) else [found]
            self._parts += [(leaf, part, weights[self.groups.of_leaf[leaf]]) for part in parts]
        return rows

    def add(self) -> str | None:
        """Add the chunk that ran to the sums. If memory runs out, free memory and try again."""
        failure = None
        while self._parts:
            leaf, rows, weights = self._parts.pop()
            add = functools.partial(self._sums[leaf].add, rows, weights)
            if (error := out_of_memory(add)) is not None:
                failure = error
                add()
        return failure

    def result(self, counted: Counted) -> Any:
        """The sum, and what else was requested."""
        totals = [total.total() for total in self._sums]
        if self._wanted is None:
            totals = [total.to(like.dtype) for total, like in zip(totals, self.like)]
        if counted.empty:
            totals = [torch.zeros_like(total) for total in totals]
        totals = all_reduced(totals, self._process_group)
        return _with_extras(tree.unflatten(self.spec, totals), self._closed(counted))


def _with_extras(result: Any, extras: dict[str, Any]) -> Any:
    """The result, in a pair with `Extras` or aux if any were requested."""
    if not extras:
        return result
    return result, extras["aux"] if [*extras] == ["aux"] else Extras(**extras)
