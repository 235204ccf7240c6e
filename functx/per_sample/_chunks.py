"""A batch in chunks: of a given size, of the size a budget allows, smaller where memory runs out.

NOTE [budget]
The peak of a call is taken to be linear in the size of its chunks: what any chunk needs, what each
example of a chunk needs, and what each example of the batch leaves behind in the result. The lines
are drawn through measurements, to the byte (:func:`functx.memory.profile`), of chunks of two and
four examples; of two chunks, so that sums are there already while a chunk runs, and of one alone,
which has nothing to put together. A peak is the highest of several that grow differently, so the
chunk size that a line gives is measured too, and the line corrected.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from functx import _torch, memory
from functx.per_sample._batch import Batch, random_state, restore_random_state

# Takes the number of examples that memory ran out with, and what the error said.
Halved = Callable[[int, str], None]
Commit = Callable[[Halved], None]


class Job(Protocol):
    """What is computed from one call's examples, chunk by chunk."""

    def run(self, batch: Batch) -> Commit | None:
        """Compute one chunk, which may run again; the commit adds it to the result for good."""

    def result(self, kept: torch.Tensor | None, size: int, empty: bool) -> Any:
        """What came of all chunks.

        Of ``size`` examples those at ``kept`` count, all if that is ``None``; where it is ``empty``
        none counts, and the one that ran was invented.
        """


MakeJob = Callable[[], Job]


def in_chunks(
    run: Callable[[int, int], Commit | None], size: int, chunk: int, halved: Halved
) -> None:
    """``run(start, stop)`` over ``size`` examples; where memory runs out, chunks are halved."""
    start = 0

    def smaller(ran: int, failure: str) -> None:
        nonlocal chunk
        chunk = max(1, ran // 2)
        halved(ran, failure)

    while start < size:
        stop = min(start + chunk, size)
        try:
            commit = run(start, stop)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or stop - start == 1:
                raise
            failure = str(error).splitlines()[0]
        else:
            if commit is not None:
                commit(smaller)
            start = stop
            continue
        # Only here is the failed run's traceback gone, with all that its frames held.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        smaller(stop - start, failure)


@dataclass
class _Line:
    """Bytes at the peak over the number of examples, see NOTE [budget]."""

    fixed: int
    each: int
    checked: int = 0  # the largest number that was measured and fits

    @classmethod
    def through(cls, two: int, four: int) -> _Line:
        """The line through the peaks of two and four examples."""
        each = max(1, (four - two + 1) // 2)
        return cls(max(0, two - 2 * each), each)

    def largest(self, most: int, room: int, measure: Callable[[int], int]) -> int:
        """How many examples fit in ``room`` bytes, ``most`` at most."""
        while (size := min(most, (room - self.fixed) // self.each)) > self.checked:
            peak = measure(size)
            if peak <= room:
                self.checked = size
            else:
                found = -(-(peak - self.fixed) // size)
                self.each = max(found, self.each + self.each // 64 + 1)
        return size


@dataclass
class Chunks:
    """How batches are cut; what was found out about it is remembered, by signatures of batches."""

    api: str
    chunk_size: int | None
    memory_budget: int | None
    randomness: str
    # The largest chunk that fits.
    _fits: dict[Any, int] = field(default_factory=dict)
    # A line for all in one chunk, one for more chunks, and what each example leaves behind.
    _lines: dict[Any, tuple[_Line, _Line, int]] = field(default_factory=dict)

    def run(self, batch: Batch, job: Job, make_job: MakeJob) -> None:
        """Hands the examples of ``batch`` to ``job`` in chunks."""
        key = batch.signature()
        saved = random_state() if self.randomness == "same" else None

        def run(start: int, stop: int) -> Commit | None:
            if saved is not None:
                restore_random_state(saved)
            try:
                return job.run(batch.chunk(start, stop))
            except RuntimeError as error:
                if stop - start > 1 and _is_of_vmap(error) and not is_out_of_memory(error):
                    error.add_note(
                        f"{self.api}: vmap, which runs {stop - start} examples at a time, can't do "
                        "this; chunk_size=1 runs each as it is, without vmap"
                    )
                raise

        def halved(size: int, failure: str) -> None:
            self._fits[key] = size // 2
            warnings.warn(
                f"{self.api}: out of memory with {size} examples at a time, going on with "
                f"{size // 2}; give chunk_size={size // 2} or a memory_budget to avoid this "
                f"({failure})",
                RuntimeWarning,
                stacklevel=outside(),
            )

        chunk = min(self._size(batch, key, make_job), self._fits.get(key, batch.size))
        in_chunks(run, batch.size, chunk, halved)

    def _size(self, batch: Batch, key: Any, make_job: MakeJob) -> int:
        """Examples in a chunk."""
        budget = self.memory_budget
        if budget is None:
            return self.chunk_size or batch.size
        if _torch.tracing():
            raise RuntimeError(
                f"{self.api}: memory can't be measured while operations are traced; give "
                "chunk_size instead of memory_budget"
            )

        def of_one(chunk: int) -> int:
            return self._profile(batch, chunk, 1, make_job).peak

        def of_more(chunk: int) -> int:
            return self._profile(batch, chunk, 2, make_job).peak - 2 * chunk * kept

        if key not in self._lines:
            two, four = (self._profile(batch, chunk, 2, make_job) for chunk in (2, 4))
            kept = max(0, four.returned - two.returned) // 4
            more = _Line.through(two.peak - 4 * kept, four.peak - 8 * kept)
            self._lines[key] = _Line.through(of_one(2), of_one(4)), more, kept
        one, more, kept = self._lines[key]
        # All in one chunk is only measured where the line says that it fits.
        may_fit = one.fixed + batch.size * one.each <= budget
        if may_fit and one.largest(batch.size, budget, of_one) == batch.size:
            return batch.size
        rest = batch.size * kept
        chunk = more.largest(batch.size, budget - rest, of_more)
        if chunk >= 1:
            return chunk
        # One example alone runs without vmap, which can take less.
        alone = of_more(1) + rest if batch.size > 1 else of_one(1)
        if alone > budget:
            raise ValueError(
                f"{self.api}: memory_budget={budget:,} bytes is too little: with chunks of one "
                f"example of {batch.size} the peak is {alone:,} bytes; raise it, or recompute "
                "activations with functx.remat"
            )
        return 1

    def _profile(self, batch: Batch, chunk: int, chunks: int, make_job: MakeJob) -> memory.Profile:
        """Chunks of ``chunk`` examples, results thrown away."""
        saved = random_state()
        examples = batch.take(torch.arange(chunk * chunks) % batch.size)

        def run() -> Any:
            job = make_job()
            for start in range(0, examples.size, chunk):
                commit = job.run(examples.chunk(start, start + chunk))
                if commit is not None:
                    commit(lambda size, failure: None)
            return job.result(None, examples.size, False)

        try:
            return memory.profile(run)
        finally:
            restore_random_state(saved)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the CPU."""
    words = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _is_of_vmap(error: BaseException) -> bool:
    """Whether an error may be due to ``vmap``: one example alone may well run."""
    # What torch says where an operation has no rule for vmap, or none that fits. ("scalar type" is
    # of autocast, which comes by where vmap takes operations apart.)
    words = ("vmap", "batching rule", "doesn't match the broadcast shape", "data-dependent")
    return any(word in str(error).lower() for word in (*words, "sparse", "scalar type"))


def outside() -> int:
    """The ``stacklevel`` of a warning for the caller of ``per_sample``."""
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("functx."):
        level, frame = level + 1, frame.f_back
    return level
