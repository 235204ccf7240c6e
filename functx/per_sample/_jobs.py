"""What is made of the gradients of a chunk: kept, normed, or clipped and added up.

NOTE [one pass or two]
The factor of an example is known when all its gradients have been normed. Until then they are
either kept (one pass), or dropped (two passes); the second pass is an ordinary backward pass of the
weighted losses (`_second`). Kept, the gradients of a chunk exist together; dropped, those of one
leaf at a time. Where losses can't run again, they are pulled back twice, and the second time each
gradient goes straight into the sum. Gradients known by factors are kept in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functx import _tree
from functx.per_sample import _second
from functx.per_sample._batch import Batch
from functx.per_sample._extras import Extras
from functx.per_sample._factors import Factored, squared_norms_of
from functx.per_sample._groups import Groups, Scaling, factors
from functx.per_sample._pull import Loss, pull
from functx.per_sample._rows import norm_dtype, squared_norms
from functx.per_sample._stack import Stack
from functx.per_sample._sums import SMALL, Sums, packed


class Leaves:
    """The leaves that are differentiated: how many, and of what shape and dtype for one example.

    Args:
        loss: Says which arguments they are in.
        batch: The arguments.
        single: Whether the user thinks of one argument, not of a tuple.
    """

    def __init__(self, loss: Loss, batch: Batch, single: bool) -> None:
        args = batch.args()
        dims = _tree.unflatten(batch.spec, batch.dims)
        chosen = tuple(args[position] for position in loss.positions)
        found, self._spec = _tree.flatten(chosen)
        mapped = _tree.leaves(tuple(dims[position] for position in loss.positions))
        self.shapes = [
            leaf.shape if dim is None else leaf.shape[:dim] + leaf.shape[dim + 1 :]
            for leaf, dim in zip(found, mapped)
        ]
        self.dtypes = [leaf.dtype for leaf in found]
        self.devices = [leaf.device for leaf in found]
        self._single = single

    def tree(self, values: Sequence[Any]) -> Any:
        """One value a leaf, as the pytree that users see."""
        tree = _tree.unflatten(self._spec, values)
        return tree[0] if self._single else tree


class _Chunk:
    """The receiver of one chunk's gradients: sums up squared norms."""

    factors = True
    committing = False
    keeps = False

    def __init__(self, job: _Job, size: int) -> None:
        self._job, self._size = job, size
        self.restart()

    def restart(self) -> None:
        self._squares: list[torch.Tensor | None] = [None] * self._job.groups.count
        self._small: list[Any] = [None] * len(self._job.leaves.shapes)

    def may_ask_again(self) -> bool:
        return False

    def again(self) -> Sequence[int]:
        return ()

    def gradient(self, leaf: int, rows: torch.Tensor | Factored) -> None:
        if isinstance(rows, Factored) or rows.shape[1:].numel() > SMALL:
            self._add(leaf, rows)
        else:
            self._small[leaf] = rows

    def _add(self, leaf: int, rows: torch.Tensor | Factored) -> None:
        group = self._job.groups.of_leaf[leaf]
        if isinstance(rows, Factored):
            square = squared_norms_of(rows.terms, self._job.norm_dtype)
        else:
            square = squared_norms(rows, self._job.norm_dtype)
        before = self._squares[group]
        self._squares[group] = square if before is None else before + square

    def norms(self) -> list[torch.Tensor]:
        """One tensor of shape ``(c,)`` a group."""
        for leaves, rows in packed(self._small, self._job.groups.of_leaf).items():
            self._add(leaves[0], rows)
        self._small = [None] * len(self._job.leaves.shapes)
        device = self._job.leaves.devices[0]
        return [
            torch.zeros(self._size, dtype=self._job.norm_dtype, device=device)
            if square is None
            else square.sqrt()
            for square in self._squares
        ]


class _Job:
    """What the jobs share: values, norms and auxiliary outputs of all chunks."""

    committing = False
    ran_out = False

    def __init__(
        self,
        loss: Loss,
        leaves: Leaves,
        groups: Groups,
        *,
        accumulation_dtype: torch.dtype | None = None,
        return_values: bool = False,
        return_norms: bool = False,
    ) -> None:
        self.loss, self.leaves, self.groups = loss, leaves, groups
        dtypes = [norm_dtype(dtype, accumulation_dtype) for dtype in leaves.dtypes]
        self.norm_dtype = dtypes[0]
        for dtype in dtypes:
            self.norm_dtype = torch.promote_types(self.norm_dtype, dtype)
        self._stacks: dict[str, Stack] = {}
        if return_values:
            self._stacks["values"] = Stack()
        if return_norms:
            self._stacks["norms"] = Stack()
        if loss.has_aux:
            self._stacks["aux"] = Stack()

    def reserve(self, size: int) -> None:
        """So many examples will come, in several chunks."""
        for stack in self._stacks.values():
            stack.reserve(size)

    def _note(self, **found: Any) -> None:
        self._noting(**found)()

    def _noting(self, **found: Any) -> Callable[[], None]:
        """As `Stack.adding`, for all of them."""
        counting = [
            self._stacks[name].adding(rows) for name, rows in found.items() if name in self._stacks
        ]

        def count() -> None:
            for one in counting:
                one()

        return count

    def _close(self, kept: torch.Tensor | None, size: int, empty: bool) -> dict[str, Any]:
        found = {name: stack.close(kept, size, empty) for name, stack in self._stacks.items()}
        if "norms" in found:
            found["norms"] = self.groups.pack(found["norms"])
        return found


class Gradients(_Job):
    """All gradients: leaves of shape ``(B, *leaf.shape)``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stacks["gradients"] = Stack()

    def run(self, batch: Batch) -> None:
        """Take in one chunk."""
        chunk = _KeepingChunk(self, batch.size, factors=False)
        values, aux = pull(self.loss, batch, chunk)
        rows = [
            torch.zeros(batch.size, *shape, dtype=dtype, device=device) if kept is None else kept
            for kept, shape, dtype, device in zip(
                chunk.kept, self.leaves.shapes, self.leaves.dtypes, self.leaves.devices
            )
        ]
        norms = chunk.blocks()[1] if "norms" in self._stacks else None
        self._note(values=values, norms=norms, aux=aux, gradients=rows)

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> tuple[Any, Extras]:
        """The gradients, and what else was asked for."""
        found = self._close(kept, size, empty)
        return self.leaves.tree(found.pop("gradients")), Extras(**found)


class Norms(_Job):
    """Norms alone: no gradient outlives its norm."""

    def run(self, batch: Batch) -> None:
        """Take in one chunk."""
        chunk = _Chunk(self, batch.size)
        values, aux = pull(self.loss, batch, chunk)
        self._note(values=values, norms=chunk.norms(), aux=aux)

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> tuple[Any, Extras]:
        """The norms, and what else was asked for."""
        found = self._close(kept, size, empty)
        return found["norms"], Extras(**{**found, "norms": None})


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
        self._wanted_dtype = accumulation_dtype
        dtypes = [_sum_dtype(dtype, accumulation_dtype) for dtype in self.leaves.dtypes]
        self.sums = Sums(self.leaves.shapes, dtypes, self.leaves.devices)

    def run(self, batch: Batch) -> None:
        """Take in one chunk."""
        self.committing = False
        if self._twice(batch):
            note = self._run_reweighted(batch)
        elif self._passes == 2:
            twice = _TwiceChunk(self, batch.size)
            values, aux = pull(self.loss, batch, twice)
            note = self._noting(values=values, norms=twice.found, aux=aux)
        else:
            chunk = _KeepingChunk(self, batch.size, factors=True)
            values, aux = pull(self.loss, batch, chunk)
            blocks, norms = chunk.blocks()
            chunk.kept.clear()
            weights = self.weights(norms)
            note = self._noting(values=values, norms=norms, aux=aux)
            self.committing = True
            for leaves in list(blocks):
                weight = weights[self.groups.of_leaf[leaves[0]]]
                self.sums.add(leaves, blocks.pop(leaves), weight)
        note()
        self.committing = False
        self.ran_out, self.sums.ran_out = self.sums.ran_out, False

    def _twice(self, batch: Batch) -> bool:
        """Whether norms come first, and then a backward pass of all examples together."""
        exact = all(_sum_dtype(dtype, self._wanted_dtype) == dtype for dtype in self.leaves.dtypes)
        if self._passes == 1 or batch.size == 1 or not exact:
            return False
        if self._passes == 2:
            return _second.possible(self.loss, batch)
        key = ("passes", batch.size, batch.signature())
        if key not in self.loss.hints:
            sizes = zip(self.leaves.shapes, self.leaves.dtypes)
            gradients = sum(shape.numel() * dtype.itemsize for shape, dtype in sizes)
            self.loss.hints[key] = _second.worth(self.loss, batch, gradients)
        return self.loss.hints[key]

    def _run_reweighted(self, batch: Batch) -> Callable[[], None]:
        chunk = _FactorsChunk(self, batch.size)
        values, aux = pull(self.loss, batch, chunk)
        norms = chunk.norms()
        weights = self.weights(norms)
        note = self._noting(values=values, norms=norms, aux=aux)
        self.committing = True
        for leaf in list(chunk.kept):
            group = self.groups.of_leaf[leaf]
            self.sums.add((leaf,), chunk.kept.pop(leaf), weights[group])
        asked = [
            group if leaf in chunk.dropped else -1 for leaf, group in enumerate(self.groups.of_leaf)
        ]

        def second(start: int, stop: int) -> dict[int, torch.Tensor]:
            some = [weight[start:stop] for weight in weights]
            rows = batch.rows(start, stop)
            return _second.add_up(self.loss, rows, values[start:stop], some, asked)

        if chunk.dropped:
            self.sums.in_halves(second, batch.size, self.sums.add_sums)
        return note

    def weights(self, norms: list[torch.Tensor]) -> list[torch.Tensor]:
        """The factors of the examples, one tensor of shape ``(c,)`` a group."""
        return [
            factors(self._scaling, norm, threshold, self.loss.api)
            for norm, threshold in zip(norms, self._thresholds)
        ]

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> tuple[Any, Extras]:
        """The sum, and what else was asked for."""
        wanted = [_as_wanted(dtype, self._wanted_dtype) for dtype in self.leaves.dtypes]
        totals = self.sums.totals(wanted)
        if empty:
            totals = [torch.zeros_like(total) for total in totals]
        return self.leaves.tree(totals), Extras(**self._close(kept, size, empty))


class _KeepingChunk(_Chunk):
    """Keeps the gradients of a chunk, all together; those that are products by their factors."""

    keeps = True

    def __init__(self, job: _Job, size: int, *, factors: bool) -> None:
        self.factors = factors
        super().__init__(job, size)

    def restart(self) -> None:
        super().restart()
        self.kept: list[Any] = [None] * len(self._job.leaves.shapes)

    def gradient(self, leaf: int, rows: torch.Tensor | Factored) -> None:
        self.kept[leaf] = rows

    def blocks(self) -> tuple[dict[tuple[int, ...], Any], list[torch.Tensor]]:
        """The gradients as `packed` puts them together, and the norms."""
        blocks = packed(self.kept, self._job.groups.of_leaf)
        for leaves, rows in blocks.items():
            self._add(leaves[0], rows)
        return blocks, self.norms()


class _FactorsChunk(_Chunk):
    """Norms; of the gradients the factors, and which ones have none."""

    def restart(self) -> None:
        super().restart()
        self.kept: dict[int, Factored] = {}
        self.dropped: set[int] = set()

    def gradient(self, leaf: int, rows: torch.Tensor | Factored) -> None:
        super().gradient(leaf, rows)
        if isinstance(rows, Factored):
            self.kept[leaf] = rows
        else:
            self.dropped.add(leaf)


class _TwiceChunk(_Chunk):
    """Norms first; the second time each gradient goes into the sum and nowhere else.

    For losses that can't be run again: the second pass uses the tape of the first.

    Factors are kept: they are small.
    """

    _job: ClippedSum

    def restart(self) -> None:
        super().restart()
        self._seen: list[int] = []
        self._kept: dict[int, Factored] = {}
        self._weights: list[torch.Tensor] | None = None

    def may_ask_again(self) -> bool:
        return True

    def again(self) -> Sequence[int]:
        self.found = self.norms()
        self._weights = self._job.weights(self.found)
        self._job.committing = self.committing = True
        for leaf in list(self._kept):
            self._sum(leaf, self._kept.pop(leaf))
        return self._seen

    def gradient(self, leaf: int, rows: torch.Tensor | Factored) -> None:
        if self._weights is not None:
            self._sum(leaf, rows)
            return
        super().gradient(leaf, rows)
        if isinstance(rows, Factored):
            self._kept[leaf] = rows
        else:
            self._seen.append(leaf)

    def _sum(self, leaf: int, rows: torch.Tensor | Factored) -> None:
        assert self._weights is not None
        self._job.sums.add((leaf,), rows, self._weights[self._job.groups.of_leaf[leaf]])


def _as_wanted(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a sum of ``dtype`` numbers, when ``wanted`` was asked for."""
    if wanted is None:
        return dtype
    return wanted.to_complex() if dtype.is_complex else wanted


def _sum_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype to add up in: short ones in float32 unless something else is asked for."""
    if wanted is None and dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return _as_wanted(dtype, wanted)
