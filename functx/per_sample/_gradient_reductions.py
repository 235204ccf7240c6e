"""What is made of the gradients of a chunk: kept, normed, or clipped and added up.

NOTE [one pass or two]
The factor of an example is known when all its gradients have been normed. Until then they are
either kept (one pass), or dropped (two passes). The second pass is an ordinary backward pass of the
weighted sum of the losses, which takes no gradient of any one example. It needs the losses a second
time, so they have to be what they were: random numbers are not allowed, and the values are
compared. Kept, the gradients of a chunk exist together; dropped, those of one leaf at a time.
Gradients known by factors are kept in any case.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from functx import _torch, _tree, memory
from functx._reverse_mode import Pullback
from functx.per_sample._batch import Batch, Counted, Inspection
from functx.per_sample._batched_function import BatchedFunction
from functx.per_sample._chunk_gradients import Arrivals, chunk_gradients, recorded
from functx.per_sample._chunks import Reduction, out_of_memory
from functx.per_sample._clipping import Groups, Scaling, factors
from functx.per_sample._sums import Factored, Term, WeightedSum, norm_dtype

# Two passes where gradients of an example take this many times the bytes of its activations: the
# second pass, which works on activations, is then next to nothing beside the first.
_WORTH = 8
_SMALL = 2**25  # bytes of gradients that are not worth a measurement


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
        shared: Whether all examples share them.
        names: What is asked for: of the fields of `Extras`, and ``"gradients"``.
        keeps: Gradients of these types are kept until a chunk has run.
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
        self.keeps: tuple[type, ...] = (torch.Tensor,) if "gradients" in names else ()
        self.like: list[torch.Tensor] = []
        self._norm_dtype = torch.float32
        leaves, self.spec = _tree.flatten(function.differentiated(batch))
        dims = _tree.leaves(function.differentiated(replace(batch, leaves=batch.dims)))
        self.shared = all(dim is None for dim in dims)
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
        only_kept = "gradients" in self.names and "norms" not in self.names
        groups = None if only_kept else self.groups.of_leaf
        return chunk_gradients(self.function, batch, Arrivals(groups, self._norm_dtype, self.keeps))

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
        passes: int | None,
    ) -> None:
        super().__init__(*args, accumulation_dtype=accumulation_dtype)
        self._scaling, self._passes = scaling, passes
        self._wanted = accumulation_dtype
        self._sums = [WeightedSum(like, self._dtype_of_sum(like)) for like in self.like]
        # Of the chunk that ran: parts of leaves, with weights; and sums, of a second pass.
        self._parts: list[tuple[int, torch.Tensor | Term, torch.Tensor]] = []
        self._totals: dict[int, torch.Tensor] = {}

    def _dtype_of_sum(self, leaf: torch.Tensor) -> torch.dtype:
        """The dtype to add up in: short ones in float32 unless something else is asked for."""
        if self._wanted is None:
            short = leaf.dtype in (torch.float16, torch.bfloat16)
            return torch.float32 if short else leaf.dtype
        return self._wanted.to_complex() if leaf.is_complex() else self._wanted

    def run(self, batch: Batch) -> dict[str, Any]:
        """Compute one chunk."""
        self._parts, self._totals = [], {}
        self.keeps = (Factored,) if self._twice(batch) else (Factored, torch.Tensor)
        found = self.pull_back(batch)
        norms, of_leaf = self.norms(found, batch.size), self.groups.of_leaf
        weights = [
            factors(self._scaling, norm, threshold, self.function.api)
            for norm, threshold in zip(norms, self.groups.thresholds)
        ]
        if found.dropped:
            self._totals = self._second_pass(batch, found, weights)
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
        while self._totals:
            leaf, total = self._totals.popitem()
            self._sums[leaf].add_sum(total)
        return failure

    def _twice(self, batch: Batch) -> bool:
        """Whether norms come first, and then a backward pass of all examples together."""
        may_run_again = self.function.randomness == "error" and not _torch.transforming()
        exact = all(self._dtype_of_sum(like) == like.dtype for like in self.like)
        if self._passes == 1 or batch.size == 1 or not (may_run_again and self.shared and exact):
            return False
        size = sum(like.numel() * like.dtype.itemsize for like in self.like)
        if self._passes == 2 or batch.size * size < _SMALL:
            return self._passes == 2
        key, hints = ("passes", batch.size, batch.signature()), self.function.hints
        if key not in hints:
            held: list[Any] = []
            one, two = (
                memory.profile(lambda few=few: held.append(self._losses(few))).kept
                for few in (batch.chunk(0, 1), batch.chunk(0, 2))
            )
            hints[key] = size > _WORTH * (two - one)
        return hints[key]

    def _second_pass(
        self, batch: Batch, first: Arrivals, weights: list[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Sums of the weighted gradients that were dropped; of other leaves nothing is computed."""
        found: dict[int, torch.Tensor] = {}
        again, pullback = self._losses(batch)
        if not torch.allclose(again, first.values, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise RuntimeError(
                f"{self.function.api}: the loss gave other values when it ran a second time: it "
                "depends on something that changes between calls; use passes=1"
            )
        by_group: dict[int, list[int]] = {}
        for leaf in sorted(first.dropped):
            by_group.setdefault(self.groups.of_leaf[leaf], []).append(leaf)
        with Inspection(_refuse_frequencies):
            for group in list(by_group):
                leaves, weight = by_group.pop(group), weights[group].to(again.dtype)
                pullback.feed(weight, found.__setitem__, leaves, retain_graph=bool(by_group))
        return found

    def _losses(self, batch: Batch) -> tuple[torch.Tensor, Pullback]:
        """The losses of all examples, and their pullback to the differentiated arguments."""

        def value_of(*args: Any, **kwargs: Any) -> Any:
            value = self.function.func(*args, **kwargs)
            return value[0] if self.function.has_aux else value

        def values_of(*args: Any) -> Any:
            return replace(batch, leaves=_tree.leaves(args)).map(value_of, "error")

        args = batch.args()
        value, _, pullback = recorded(self.function, args, {}, batch.positions, values_of)
        return value, pullback

    def result(self, counted: Counted) -> tuple[Any, Extras]:
        """The sum, and what else was asked for."""
        totals = [total.total() for total in self._sums]
        if self._wanted is None:
            totals = [total.to(like.dtype) for total, like in zip(totals, self.like)]
        if counted.empty:
            totals = [torch.zeros_like(total) for total in totals]
        return _tree.unflatten(self.spec, totals), Extras(**self.stack.close(counted))


def _refuse_frequencies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses an embedding that scales gradients by how often all examples use a row."""
    if func is torch.ops.aten.embedding_dense_backward.default and args[4]:
        raise RuntimeError(
            "per_sample.clipped_sum: an embedding has scale_grad_by_freq=True, and in a backward "
            "pass of all examples it counts those of all; use passes=1"
        )
