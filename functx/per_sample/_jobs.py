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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from functx import _torch, _tree, memory
from functx.per_sample._batch import Batch
from functx.per_sample._chunks import Commit, Halved, in_chunks, is_out_of_memory
from functx.per_sample._groups import Groups, Scaling, factors
from functx.per_sample._options import PerSample
from functx.per_sample._pull import Arrivals, pull, recorded
from functx.per_sample._sums import Factored, Rows, Stack, WeightedSum, norm_dtype

# Two passes where gradients of an example take this many times the bytes of its activations: the
# second pass, which works on activations, is then next to nothing beside the first.
_WORTH = 8
_SMALL = 2**25  # bytes of gradients about which nobody would measure anything


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


class _Job:
    """What the jobs share: values, norms and auxiliary outputs of all chunks.

    Attributes:
        like: The leaves that are differentiated, for one example: of shape, dtype and device only.
        names: What is asked for besides the result.
    """

    factors = True  # whether gradients may be known by factors

    def __init__(
        self,
        over: PerSample,
        batch: Batch,
        groups: Groups,
        *,
        return_values: bool,
        return_norms: bool = True,
        accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        self.over, self.groups = over, groups
        self.like: list[torch.Tensor] = []
        self.norm_dtype = torch.float32
        for leaf, dim in batch.differentiated():
            shape = leaf.shape if dim is None else leaf.shape[:dim] + leaf.shape[dim + 1 :]
            self.like.append(leaf.detach().new_empty(()).expand(shape))
            wanted = norm_dtype(leaf.dtype, accumulation_dtype)
            self.norm_dtype = torch.promote_types(self.norm_dtype, wanted)
        _, self._spec = _tree.flatten(over.differentiated(batch))
        asked = {"values": return_values, "norms": return_norms, "aux": over.has_aux}
        self.names = [name for name, is_asked in asked.items() if is_asked]
        self._stack = Stack()

    def pull(self, batch: Batch, *keeps: type) -> tuple[Any, Any, Arrivals]:
        """Values, auxiliary outputs, and gradients, of which those of some types are kept."""
        of_leaf = self.groups.of_leaf if self.factors or "norms" in self.names else None
        arrivals = functools.partial(Arrivals, of_leaf, self.norm_dtype, keeps, self.factors)
        return pull(self.over, batch, arrivals)

    def norms(self, found: Arrivals, size: int) -> list[torch.Tensor]:
        """The norms of a chunk, of shape ``(c,)``, one tensor a group."""
        zeros = self.like[0].new_zeros(size, dtype=self.norm_dtype)
        groups = range(len(self.groups.thresholds))
        return [found.squares.get(group, zeros).sqrt() for group in groups]

    def put(self, batch: Batch, **found: Any) -> None:
        """Put what is asked for in its place."""
        self._stack.put(batch, {name: found[name] for name in self.names})

    def close(self, kept: torch.Tensor | None, size: int, empty: bool) -> dict[str, Any]:
        """What is asked for, of all examples."""
        found: dict[str, Any] = self._stack.close(kept, size, empty)
        if "norms" in found:
            found["norms"] = self.groups.pack(found["norms"])
        return found

    def tree(self, values: Sequence[Any]) -> Any:
        """One value a leaf, as the pytree that users see."""
        return _tree.unflatten(self._spec, values)


class Gradients(_Job):
    """All gradients: leaves of shape ``(B, *leaf.shape)``."""

    factors = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.names.append("gradients")

    def run(self, batch: Batch) -> None:
        """Compute one chunk."""
        values, aux, found = self.pull(batch, torch.Tensor)
        rows = [
            found.kept[leaf] if leaf in found.kept else like.new_zeros(batch.size, *like.shape)
            for leaf, like in enumerate(self.like)
        ]
        self.put(batch, values=values, norms=self.norms(found, batch.size), aux=aux, gradients=rows)

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> tuple[Any, Extras]:
        """The gradients, and what else was asked for."""
        found = self.close(kept, size, empty)
        return self.tree(found.pop("gradients")), Extras(**found)


class Norms(_Job):
    """Norms alone: no gradient outlives its norm."""

    def run(self, batch: Batch) -> None:
        """Compute one chunk."""
        values, aux, found = self.pull(batch)
        self.put(batch, values=values, norms=self.norms(found, batch.size), aux=aux)

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> tuple[Any, Extras]:
        """The norms, and what else was asked for."""
        found = self.close(kept, size, empty)
        return found.pop("norms"), Extras(**found)


class _NoFrequencies(_torch.TorchDispatchMode):
    """Refuses an embedding that scales gradients by how often all examples use a row."""

    only_observes = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding_dense_backward.default and args[4]:
            raise RuntimeError(
                "per_sample.clipped_sum: an embedding has scale_grad_by_freq=True, and in a "
                "backward pass of all examples it counts those of all; use passes=1"
            )
        return func(*args, **(kwargs or {}))


class ClippedSum(_Job):
    """The sum of all gradients, each times the factor that its norm gives it."""

    def __init__(
        self,
        *args: Any,
        scaling: Scaling,
        accumulation_dtype: torch.dtype | None,
        passes: int | None,
        **options: Any,
    ) -> None:
        super().__init__(*args, accumulation_dtype=accumulation_dtype, **options)
        self._scaling, self._passes = scaling, passes
        self._wanted = accumulation_dtype
        self._sums = [WeightedSum(like, self._dtype_of_sum(like)) for like in self.like]

    def _dtype_of_sum(self, leaf: torch.Tensor) -> torch.dtype:
        """The dtype to add up in: short ones in float32 unless something else is asked for."""
        if self._wanted is None:
            short = leaf.dtype in (torch.float16, torch.bfloat16)
            return torch.float32 if short else leaf.dtype
        return self._wanted.to_complex() if leaf.is_complex() else self._wanted

    def run(self, batch: Batch) -> Commit:
        """Compute one chunk."""
        keeps = (Factored,) if self._twice(batch) else (Factored, torch.Tensor)
        values, aux, found = self.pull(batch, *keeps)
        norms, of_leaf = self.norms(found, batch.size), self.groups.of_leaf
        weights = [
            factors(self._scaling, norm, threshold, self.over.api)
            for norm, threshold in zip(norms, self.groups.thresholds)
        ]
        totals = self._second_pass(batch, values, weights, found.dropped) if found.dropped else {}
        self.put(batch, values=values, norms=norms, aux=aux)

        def commit(halved: Halved) -> None:
            failures: list[str] = []
            try:
                while found.kept:
                    leaf, rows = found.kept.popitem()
                    self._add(leaf, rows, weights[of_leaf[leaf]], failures)
                while totals:
                    leaf, total = totals.popitem()
                    self._sums[leaf].add_sum(total)
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    error.add_note(
                        f"{self.over.api}: memory ran out while a chunk was being added to the "
                        "result, which can't be undone; call again with a smaller chunk_size"
                    )
                raise
            if failures:
                halved(batch.size, failures[0])

        return commit

    def _add(self, leaf: int, rows: Rows, weights: torch.Tensor, failures: list[str]) -> None:
        # One after the other: a part that was added must not be added again.
        for part in rows.terms if isinstance(rows, Factored) else [rows]:
            add = functools.partial(self._sums[leaf].add, part, weights)
            in_chunks(add, len(weights), len(weights), lambda size, why: failures.append(why))

    def _twice(self, batch: Batch) -> bool:
        """Whether norms come first, and then a backward pass of all examples together."""
        may_run_again = self.over.randomness == "error" and not _torch.transforming()
        shared = all(dim is None for _, dim in batch.differentiated())
        exact = all(self._dtype_of_sum(like) == like.dtype for like in self.like)
        if self._passes == 1 or batch.size == 1 or not (may_run_again and shared and exact):
            return False
        size = sum(like.numel() * like.dtype.itemsize for like in self.like)
        if self._passes == 2 or batch.size * size < _SMALL:
            return self._passes == 2
        key = ("passes", batch.size, batch.signature())
        if key not in self.over.hints:
            held: list[Any] = []
            one, two = (
                memory.profile(lambda few=few: held.append(self._losses(few))).kept
                for few in (batch.chunk(0, 1), batch.chunk(0, 2))
            )
            self.over.hints[key] = size > _WORTH * (two - one)
        return self.over.hints[key]

    def _second_pass(
        self, batch: Batch, values: torch.Tensor, weights: list[torch.Tensor], leaves: list[int]
    ) -> dict[int, torch.Tensor]:
        """Sums of weighted gradients, of some leaves; of the others no gradient is computed."""
        found: dict[int, torch.Tensor] = {}
        again, pullback = self._losses(batch)
        if not torch.allclose(again, values, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise RuntimeError(
                f"{self.over.api}: the loss gave other values when it ran a second time: it "
                "depends on something that changes between calls; use passes=1"
            )
        of_leaf = {leaf: self.groups.of_leaf[leaf] for leaf in sorted(leaves)}
        groups = sorted(set(of_leaf.values()))
        for group in groups:
            receivers = {
                leaf: functools.partial(found.__setitem__, leaf)
                for leaf, own in of_leaf.items()
                if own == group
            }
            with _NoFrequencies():
                pullback.feed(weights[group].to(again.dtype), receivers, group != groups[-1])
        return found

    def _losses(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        """The losses of all examples, and their pullback to the differentiated arguments."""

        def value_of(*args: Any, **kwargs: Any) -> Any:
            value = self.over.func(*args, **kwargs)
            return value[0] if self.over.has_aux else value

        def values_of(*args: Any) -> Any:
            return replace(batch, leaves=_tree.leaves(args)).map(value_of, "error")

        value, _, pullback = recorded(self.over, batch.args(), {}, batch.positions, values_of)
        return value, pullback

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> tuple[Any, Extras]:
        """The sum, and what else was asked for."""
        totals = [total.total() for total in self._sums]
        if self._wanted is None:
            totals = [total.to(like.dtype) for total, like in zip(totals, self.like)]
        if empty:
            totals = [torch.zeros_like(total) for total in totals]
        return self.tree(totals), Extras(**self.close(kept, size, empty))
