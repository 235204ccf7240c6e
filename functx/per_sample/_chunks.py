"""A batch in chunks: of a given size, of the size a budget allows, smaller where memory runs out.

NOTE [budget]
What a run of chunks of ``c`` examples of ``B`` has live at its peak is taken to be linear,
``fixed + c * chunk + B * kept``: what each chunk needs while it runs, what each example leaves
behind in the result, and the rest. Two chunks of two examples and two of four, measured to the byte
(:func:`functx.memory.profile`), give the three numbers; two, so that sums are there already while a
chunk runs. A peak is the highest of several that grow differently, so the chunk size they give is
measured too, and corrected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from functx import _torch, memory
from functx.per_sample import _random
from functx.per_sample._batch import Batch
from functx.per_sample._failure import free_memory, is_of_vmap, is_out_of_memory, outside


class Job(Protocol):
    """What is computed from one call's examples, chunk by chunk."""

    committing: bool  # whether part of a chunk is in the result: it can't be run again
    ran_out: bool  # whether memory ran out in the last chunk, which went in nevertheless

    def run(self, batch: Batch) -> None:
        """Take in one chunk; all of it, or, unless `committing`, nothing."""

    def reserve(self, size: int) -> None:
        """So many examples will come, in several chunks."""

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> Any:
        """What came of all chunks.

        Args:
            kept: Where the examples that count are among ``size``; ``None`` if all do.
            size: The number of examples.
            empty: None counts, and the one that ran was invented.
        """


@dataclass
class _Needs:
    """Bytes that examples of one signature take, see NOTE [budget].

    Attributes:
        fixed: In chunks: whatever their size.
        each: For each example of a chunk.
        kept: For each example of the batch.
        whole: In one chunk, which has nothing to put together: whatever its size, and for each.
        checked: Whether ``each`` has been corrected.
        largest: The largest batch seen to fit in one chunk.
    """

    fixed: int
    each: int
    kept: int
    whole: tuple[int, int]
    checked: bool = False
    largest: int = 0


@dataclass
class Chunking:
    """How to cut batches.

    Attributes:
        chunk_size: Examples in a chunk; ``None`` for all.
        memory_budget: Bytes instead.
        randomness: As for :func:`torch.func.vmap`.
        api: The name for error messages.
    """

    chunk_size: int | None
    memory_budget: int | None
    randomness: str
    api: str

    def __post_init__(self) -> None:
        _random.check(self.randomness, self.api)
        if self.chunk_size is not None and self.memory_budget is not None:
            raise ValueError(
                f"{self.api}: chunk_size and memory_budget exclude each other, got "
                f"{self.chunk_size} and {self.memory_budget}"
            )
        for name in ("chunk_size", "memory_budget"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{self.api}: {name} must be an int, got {value!r}")
            if value <= 0:
                raise ValueError(f"{self.api}: {name} should be greater than 0, got {value}")
        self._fits: dict[Any, int] = {}  # by signature: the largest chunk that fits
        self._needs: dict[Any, _Needs] = {}  # by signature

    def run(self, batch: Batch, job: Job, make_job: Callable[[], Job]) -> None:
        """Hands the examples of ``batch`` to ``job`` in chunks."""
        key = batch.signature()
        chunk = min(self._size(batch, key, make_job), self._fits.get(key, batch.size))
        if chunk < batch.size:
            job.reserve(batch.size)
        saved = _random.state() if self.randomness == "same" else None
        start = 0
        while start < batch.size:
            stop = min(start + chunk, batch.size)
            if saved is not None:
                _random.restore(saved)
            failure, done = None, start
            try:
                job.run(batch.rows(start, stop))
                done = stop
                if job.ran_out and stop - start > 1:
                    failure = "while it was added up"
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or stop - start == 1:
                    if stop - start > 1 and is_of_vmap(error):
                        error.add_note(
                            f"{self.api}: vmap, which runs {stop - start} examples at a time, "
                            "can't do this; chunk_size=1 runs each as it is, without vmap"
                        )
                    raise
                if job.committing:
                    error.add_note(
                        f"{self.api}: memory ran out while a chunk was being added to the result, "
                        "which can't be undone; call again with a smaller chunk_size"
                    )
                    raise
                failure = str(error).splitlines()[0]
            size, start = stop - start, done
            if failure is None:
                continue
            # Only here is the failed run's traceback gone, with all that its frames held.
            chunk = self._fits[key] = size // 2
            free_memory()
            warnings.warn(
                f"{self.api}: out of memory with {size} examples at a time, going on with "
                f"{chunk}; give chunk_size={chunk} or a memory_budget to avoid this ({failure})",
                RuntimeWarning,
                stacklevel=outside(),
            )
            if chunk < batch.size:
                job.reserve(batch.size)

    def _size(self, batch: Batch, key: Any, make_job: Callable[[], Job]) -> int:
        """Examples in a chunk."""
        if self.memory_budget is None:
            return batch.size if self.chunk_size is None else self.chunk_size
        if _torch.tracing():
            raise RuntimeError(
                f"{self.api}: memory can't be measured while operations are traced; give "
                "chunk_size instead of memory_budget"
            )
        if key not in self._needs:
            self._needs[key] = self._measured(batch, make_job)
        needs = self._needs[key]
        whole = needs.whole[0] + batch.size * needs.whole[1]
        if whole <= self.memory_budget and self._fits_whole(batch, needs, make_job):
            return batch.size
        left = self.memory_budget - needs.fixed - batch.size * needs.kept
        if left >= needs.each:
            if not needs.checked:
                self._check(batch, needs, make_job)
                left = self.memory_budget - needs.fixed - batch.size * needs.kept
            if left >= needs.each:
                return min(batch.size, left // needs.each)
        # One example alone runs without vmap, which can take less.
        both = batch.size > 1
        alone = self._profile(batch, 1, make_job, both).peak
        alone += (batch.size - (2 if both else 1)) * needs.kept
        if alone > self.memory_budget:
            raise ValueError(
                f"{self.api}: memory_budget={self.memory_budget:,} bytes is too little: with "
                f"chunks of one example of {batch.size} the peak is {alone:,} bytes; raise "
                "it, or recompute activations with functx.remat"
            )
        return 1

    def _measured(self, batch: Batch, make_job: Callable[[], Job]) -> _Needs:
        small, large = (self._profile(batch, chunk, make_job) for chunk in (2, 4))
        kept = max(0, large.returned - small.returned) // 4
        each = max(1, (large.peak - small.peak - 4 * kept + 1) // 2)
        fixed = max(0, small.peak - 2 * each - 4 * kept)
        one, two = (self._profile(batch, chunk, make_job, both=False).peak for chunk in (2, 4))
        slope = max(1, (two - one + 1) // 2)
        return _Needs(fixed, each, kept, (max(0, one - 2 * slope), slope))

    def _fits_whole(self, batch: Batch, needs: _Needs, make_job: Callable[[], Job]) -> bool:
        """Whether all examples fit in one chunk, by measurement where a larger one did not."""
        assert self.memory_budget is not None
        if batch.size > needs.largest:
            peak = self._profile(batch, batch.size, make_job, both=False).peak
            if peak > self.memory_budget:
                slope = max(needs.whole[1] + 1, -(-(peak - needs.whole[0]) // batch.size))
                needs.whole = (needs.whole[0], slope)
                return False
            needs.largest = batch.size
        return True

    def _check(self, batch: Batch, needs: _Needs, make_job: Callable[[], Job]) -> None:
        """Make ``needs.each`` larger until the chunk it says keeps to the budget."""
        assert self.memory_budget is not None
        needs.checked = True
        while True:
            left = self.memory_budget - needs.fixed - batch.size * needs.kept
            chunk = min(batch.size, left // needs.each)
            if chunk < 1:
                return
            peak = self._profile(batch, chunk, make_job).peak
            peak += (batch.size - 2 * chunk) * needs.kept
            if peak <= self.memory_budget:
                return
            found = -(-(peak - needs.fixed - batch.size * needs.kept) // chunk)
            needs.each = max(found, needs.each + needs.each // 64 + 1)

    def _profile(
        self, batch: Batch, chunk: int, make_job: Callable[[], Job], both: bool = True
    ) -> memory.Profile:
        """A run of two chunks of ``chunk`` examples (one, unless ``both``), results thrown away."""
        size = 2 * chunk if both else chunk
        index = torch.arange(size) % batch.size
        saved = _random.state()
        examples = batch.take(index)

        def run() -> Any:
            job = make_job()
            if both:
                job.reserve(size)
            for start in range(0, size, chunk):
                job.run(examples.rows(start, start + chunk))
            return job.result(None, size, False)

        try:
            return memory.profile(run)
        finally:
            _random.restore(saved)
