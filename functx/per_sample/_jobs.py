"""What is made of the gradients of a chunk: kept, normed, or clipped and added up.

NOTE [one pass or two]
The factor of an example is known when all its gradients have been normed. Until then they are
either kept (one pass), or dropped (two passes); the second pass is an ordinary backward pass of the
weighted losses (`_second`). Kept, the gradients of a chunk exist together; dropped, those of one
leaf at a time. Gradients known by factors are kept in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from functx import _tree
from functx.per_sample import _second
from functx.per_sample._batch import Batch
from functx.per_sample._chunks import Commit, Halved, in_chunks, is_out_of_memory
from functx.per_sample._groups import Groups, Scaling, factors
from functx.per_sample._pull import Loss, pull
from functx.per_sample._stack import Stack
from functx.per_sample._sums import Factored, Rows, WeightedSum, norm_dtype, squared_norms


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


class Leaves:
    """The leaves that are differentiated: of what shape and dtype for one example.

    Args:
        batch: The arguments.
        positions: Of the differentiated ones.
        single: Whether the user thinks of one argument, not of a tuple.
    """

    def __init__(self, batch: Batch, positions: Sequence[int], single: bool) -> None:
        args = batch.args()
        chosen = tuple(args[position] for position in positions)
        self.argument: Any = chosen[0] if single else chosen
        found, self._spec = _tree.flatten(self.argument)
        self.shapes = [
            leaf.shape if dim is None else leaf.shape[:dim] + leaf.shape[dim + 1 :]
            for leaf, dim in zip(found, batch.dims_of(positions))
        ]
        self.dtypes = [leaf.dtype for leaf in found]
        self.devices = [leaf.device for leaf in found]

    def tree(self, values: Sequence[Any]) -> Any:
        """One value a leaf, as the pytree that users see."""
        return _tree.unflatten(self._spec, values)


class _Arrivals:
    """The gradients of one chunk as they arrive: norms, and those that are kept.

    Args:
        job: Whose.
        size: How many examples there are.
        keeps: Which gradients.
        factors: Whether some may be known by their factors.
    """

    def __init__(
        self, job: _Job, size: int, keeps: Literal["all", "factored", "none"], factors: bool = True
    ) -> None:
        self._job, self._size, self._keeps, self.factors = job, size, keeps, factors
        self._squares: list[torch.Tensor | None] = [None] * job.groups.count
        self.kept: dict[int, Rows] = {}
        self.dropped: list[int] = []

    def gradient(self, leaf: int, rows: Rows) -> None:
        """Take the gradients by one leaf."""
        if self._job.normed:
            group = self._job.groups.of_leaf[leaf]
            square, before = squared_norms(rows, self._job.norm_dtype), self._squares[group]
            self._squares[group] = square if before is None else before + square
        if self._keeps == "all" or (self._keeps == "factored" and isinstance(rows, Factored)):
            self.kept[leaf] = rows
        else:
            self.dropped.append(leaf)

    def norms(self) -> list[torch.Tensor]:
        """One tensor of shape ``(c,)`` a group."""
        dtype, device = self._job.norm_dtype, self._job.leaves.devices[0]
        return [
            torch.zeros(self._size, dtype=dtype, device=device) if square is None else square.sqrt()
            for square in self._squares
        ]


class _Job:
    """What the jobs share: values, norms and auxiliary outputs of all chunks."""

    def __init__(
        self,
        loss: Loss,
        leaves: Leaves,
        groups: Groups,
        *,
        return_values: bool,
        return_norms: bool,
        accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        self.loss, self.leaves, self.groups = loss, leaves, groups
        self.normed = True
        self.norm_dtype = norm_dtype(leaves.dtypes[0], accumulation_dtype)
        for dtype in leaves.dtypes:
            wanted = norm_dtype(dtype, accumulation_dtype)
            self.norm_dtype = torch.promote_types(self.norm_dtype, wanted)
        asked = {"values": return_values, "norms": return_norms, "aux": loss.has_aux}
        self._names = [name for name, is_asked in asked.items() if is_asked]
        self._stack = Stack()

    def _put(self, batch: Batch, **found: Any) -> None:
        self._stack.put(batch, {name: found[name] for name in self._names})

    def _close(self, kept: torch.Tensor | None, size: int, empty: bool) -> dict[str, Any]:
        found: dict[str, Any] = self._stack.close(kept, size, empty)
        if "norms" in found:
            found["norms"] = self.groups.pack(found["norms"])
        return found


class Gradients(_Job):
    """All gradients: leaves of shape ``(B, *leaf.shape)``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.normed = "norms" in self._names
        self._names.append("gradients")

    def run(self, batch: Batch) -> None:
        """Compute one chunk."""
        values, aux, found = pull(
            self.loss, batch, lambda: _Arrivals(self, batch.size, "all", factors=False)
        )
        like = zip(self.leaves.shapes, self.leaves.dtypes, self.leaves.devices)
        rows = [
            found.kept[leaf]
            if leaf in found.kept
            else torch.zeros(batch.size, *shape, dtype=dtype, device=device)
            for leaf, (shape, dtype, device) in enumerate(like)
        ]
        self._put(batch, values=values, norms=found.norms(), aux=aux, gradients=rows)

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> tuple[Any, Extras]:
        """The gradients, and what else was asked for."""
        found = self._close(kept, size, empty)
        return self.leaves.tree(found.pop("gradients")), Extras(**found)


class Norms(_Job):
    """Norms alone: no gradient outlives its norm."""

    def run(self, batch: Batch) -> None:
        """Compute one chunk."""
        values, aux, found = pull(self.loss, batch, lambda: _Arrivals(self, batch.size, "none"))
        self._put(batch, values=values, norms=found.norms(), aux=aux)

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> tuple[Any, Extras]:
        """The norms, and what else was asked for."""
        found = self._close(kept, size, empty)
        return found.pop("norms"), Extras(**found)


class ClippedSum(_Job):
    """The sum of all gradients, each times the factor that its norm gives it."""

    def __init__(
        self,
        *args: Any,
        scaling: Scaling,
        thresholds: list[Any],
        accumulation_dtype: torch.dtype | None,
        passes: int | None,
        **options: Any,
    ) -> None:
        super().__init__(*args, accumulation_dtype=accumulation_dtype, **options)
        self._scaling, self._thresholds, self._passes = scaling, thresholds, passes
        dtypes = self.leaves.dtypes
        self._dtypes = [_as_wanted(dtype, accumulation_dtype) for dtype in dtypes]
        # Short ones are added up in float32 unless something else is asked for.
        short = (torch.float16, torch.bfloat16) if accumulation_dtype is None else ()
        sums = [torch.float32 if dtype in short else dtype for dtype in self._dtypes]
        self._exact = sums == dtypes
        self._sums = list(map(WeightedSum, self.leaves.shapes, sums, self.leaves.devices))

    def run(self, batch: Batch) -> Commit:
        """Compute one chunk."""
        keeps: Literal["all", "factored"] = "factored" if self._twice(batch) else "all"
        values, aux, found = pull(self.loss, batch, lambda: _Arrivals(self, batch.size, keeps))
        norms, of_leaf = found.norms(), self.groups.of_leaf
        weights = [
            factors(self._scaling, norm, threshold, self.loss.api)
            for norm, threshold in zip(norms, self._thresholds)
        ]
        totals: dict[int, torch.Tensor] = {}
        if found.dropped:
            groups = [
                of_leaf[leaf] if leaf in found.dropped else -1 for leaf in range(len(of_leaf))
            ]
            totals = _second.add_up(self.loss, batch, values, weights, groups)
        self._put(batch, values=values, norms=norms, aux=aux)

        def commit(halved: Halved) -> None:
            size, kept = batch.size, found.kept
            try:
                for leaf in list(kept):
                    self._add(leaf, kept.pop(leaf), weights[of_leaf[leaf]], halved)
                for leaf in list(totals):
                    total = totals.pop(leaf)
                    self._add(leaf, total.unsqueeze(0), total.new_ones(1), halved)
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    error.add_note(
                        f"{self.loss.api}: memory ran out while a chunk of {size} was being added "
                        "to the result, which can't be undone; call again with a smaller chunk_size"
                    )
                raise

        return commit

    def _add(self, leaf: int, rows: Rows, weights: torch.Tensor, halved: Halved) -> None:
        def add(start: int, stop: int) -> None:
            self._sums[leaf].add(rows, weights, start, stop)

        in_chunks(add, len(weights), len(weights), halved)

    def _twice(self, batch: Batch) -> bool:
        """Whether norms come first, and then a backward pass of all examples together."""
        if self._passes == 1 or batch.size == 1 or not self._exact:
            return False
        if not _second.possible(self.loss, batch):
            return False
        if self._passes == 2:
            return True
        key = ("passes", batch.size, batch.signature())
        if key not in self.loss.hints:
            sizes = zip(self.leaves.shapes, self.leaves.dtypes)
            gradients = sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)
            self.loss.hints[key] = _second.worth(self.loss, batch, gradients)
        return self.loss.hints[key]

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> tuple[Any, Extras]:
        """The sum, and what else was asked for."""
        totals = [self._sums.pop(0).total().to(dtype) for dtype in self._dtypes]
        if empty:
            totals = [torch.zeros_like(total) for total in totals]
        return self.leaves.tree(totals), Extras(**self._close(kept, size, empty))


def _as_wanted(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a sum of ``dtype`` numbers, when ``wanted`` was asked for."""
    if wanted is None:
        return dtype
    return wanted.to_complex() if dtype.is_complex else wanted
