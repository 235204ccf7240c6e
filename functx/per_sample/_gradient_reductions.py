"""What is made of the gradients of a chunk: kept, normed, or clipped and added up.

The factor of an example is known when all its gradients have been normed. Until then those of the
chunk are kept, by their factors where these are known.
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
        rows, kept, _ = self.pull_back(batch, keeps=self._gradients)
        if self._gradients:
            rows["gradients"] = [
                kept[leaf] if leaf in kept else like.new_zeros(batch.size, *like.shape)
                for leaf, like in enumerate(self.like)
            ]
        return rows

    def result(self, counted: Counted) -> Any:
        """The gradients or else the norms, and what else was asked for."""
        found = self._closed(counted)
        return _with_extras(found.pop("gradients" if self._gradients else "norms"), found)

    def _closed(self, counted: Counted) -> dict[str, Any]:
        """What has been stacked, as users see it."""
        found = self.stack.close(counted)
        if "gradients" in found:
            found["gradients"] = stacked(self.spec, found["gradients"])
        if "norms" in found:
            found["norms"] = self.groups.pack(found["norms"])
        if "aux" in found:
            found["aux"] = stacked(self.structure, found["aux"])
        return found

    def pull_back(
        self, batch: Batch, keeps: bool
    ) -> tuple[dict[str, Any], dict[int, Rows], list[torch.Tensor]]:
        """Of one chunk what `Extras` names, the gradients by leaf, and the norms by group."""
        groups = None if self._gradients and "norms" not in self._names else self.groups.of_leaf
        arrivals = Arrivals(groups, self._norm_dtype, keeps, factors=not self._gradients)
        found = chunk_gradients(self.function, batch, arrivals)
        self.structure = found.structure
        zeros = self.like[0].new_zeros(batch.size, dtype=self._norm_dtype)
        numbers = range(len(self.groups.thresholds))
        norms = [found.squares.get(group, zeros).sqrt() for group in numbers]
        rows = {"values": found.values, "norms": norms, "aux": found.aux}
        return {name: rows[name] for name in self._names}, found.kept, norms


class ClippedSum(StackedResults):
    """The sum of all gradients, each times the factor that its norm gives it."""

    def __init__(
        self, *args: Any, scaling: Scaling, accumulation_dtype: Any, process_group: Any
    ) -> None:
        super().__init__(*args, accumulation_dtype=accumulation_dtype)
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
        rows, kept, norms = self.pull_back(batch, keeps=True)
        weights = [
            factors(self._scaling, norm, threshold, self.function.api)
            for norm, threshold in zip(norms, self.groups.thresholds)
        ]
        for leaf, found in kept.items():
            parts = found.terms if isinstance(found, Factored) else [found]
            self._parts += [(leaf, part, weights[self.groups.of_leaf[leaf]]) for part in parts]
        return rows

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

    def result(self, counted: Counted) -> Any:
        """The sum, and what else was asked for."""
        totals = [total.total() for total in self._sums]
        if self._wanted is None:
            totals = [total.to(like.dtype) for total, like in zip(totals, self.like)]
        if counted.empty:
            totals = [torch.zeros_like(total) for total in totals]
        totals = all_reduced(totals, self._process_group)
        return _with_extras(tree.unflatten(self.spec, totals), self._closed(counted))


def _with_extras(result: Any, extras: dict[str, Any]) -> Any:
    """What a function of a batch returns: the result, and what else was asked for."""
    if not extras:
        return result
    return result, extras["aux"] if [*extras] == ["aux"] else Extras(**extras)
