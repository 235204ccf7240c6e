"""Run a batch in chunks: of a fixed size, or as large as a budget allows.

If memory runs out, the chunk is halved.

NOTE [budget]
The peak of a call is modelled as linear in the size of its chunks: a constant, a number of bytes
for each example of a chunk, and a number of bytes for each example of the batch, which its part of
the result takes. The coefficients come from exact measurements (:func:`functx.memory.profile`) with
chunks of two and four examples. One model is for calls with several chunks, and is measured with
two of them, so that partial sums exist while a chunk runs. Another is for a call with one chunk,
which has nothing to combine. The true peak is the maximum of several that grow at different rates.
So the chunk size that a model gives is measured as well, and the model corrected.

What could be improved: the first call with a shape runs up to eight examples several times to
measure, and forgets the results.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functx import _torch, memory
from functx._core import line_of, validate, where
from functx._core import tree as _tree
from functx.per_sample._batch import (
    Batch,
    Counted,
    random_state,
    restore_random_state,
    stacked,
)


def followed(leaves: Sequence[Any]) -> bool:
    """Whether autograd, a transform or a trace records operations on these leaves."""
    if _torch.transforming() or _torch.dual_level() >= 0:
        return True
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in leaves)


class Stack:
    """Concatenates pytrees of tensors with leading dimension ``c``, one per chunk.

    The rows of a chunk are copied into the result at once, so that the rows of all chunks and the
    result are not alive at the same time. If something records operations on the rows, they are
    concatenated at the end instead, because copies would not be recorded. A chunk that runs twice
    replaces its earlier rows.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[torch.Tensor]] = {}  # by the position of their first example
        self._reserved: set[int] = set()  # positions of parts with a place for a whole batch
        self._spec: _tree.TreeSpec = None

    def put(self, batch: Batch, tree: Any) -> None:
        """Store the rows of a chunk."""
        leaves, self._spec = _tree.flatten(tree)
        begin, size = batch.whole
        if begin not in self._reserved:
            if batch.start > begin or batch.size == size or followed(leaves):
                self._parts[batch.start] = leaves
                return
            self._parts[begin] = [part.new_empty(size, *part.shape[1:]) for part in leaves]
            self._reserved.add(begin)
        first = batch.start - begin
        for whole, part in zip(self._parts[begin], leaves):
            whole[first : first + batch.size] = part

    def before(self, batch: Batch) -> torch.Tensor:
        """The rows of all earlier chunks, for a tree with one leaf."""
        found = [self._parts[start][0] for start in sorted(self._parts) if start < batch.start]
        return (torch.cat(found) if len(found) > 1 else found[0])[: batch.start]

    def close(self, counted: Counted) -> Any:
        """All rows, with zeros for padding."""
        columns = zip(*(self._parts[start] for start in sorted(self._parts)))
        whole = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in columns]
        self._parts = {}
        return _tree.unflatten(self._spec, [counted.rows(leaf) for leaf in whole])


class Reduction:
    """Computes the result of one call, chunk by chunk. This class stacks a function's results.

    Attributes:
        func: The function of one example.
        structure: The structure of its result, known once it has run.
        randomness: As for `Batch.map`.
        stack: The rows that `run` has returned.
    """

    def __init__(self, func: Callable[..., Any], randomness: str) -> None:
        self.func, self.randomness, self.stack = func, randomness, Stack()
        self.structure: _tree.TreeSpec = None
        self.is_all = False  # whether it is measured with one chunk for all examples

    def run(self, batch: Batch) -> Any:
        """Compute one chunk and return its rows, in built-in containers. It may run again."""
        leaves, self.structure = batch.map(self.func, self.randomness)
        return leaves

    def stack_rows(self, batch: Batch) -> None:
        """Compute one chunk and store its rows. This can be repeated if memory runs out."""
        rows = batch.call.run(functools.partial(self.run, batch), self.randomness)
        self.stack.put(batch, rows)

    def add(self) -> str | None:
        """Add the chunk that ran to sums. This can't be undone.

        Returns the message of the error if memory ran out and the addition had to be repeated.
        """
        return None

    def result(self, counted: Counted) -> Any:
        """The result of all chunks."""
        return stacked(self.structure, self.stack.close(counted))


class _Line:
    """A linear model of the peak by number of examples, see NOTE [budget]."""

    def __init__(self, two: int, four: int) -> None:
        self._each = max(1, (four - two + 1) // 2)
        self._fixed = max(0, two - 2 * self._each)
        self._checked = 0  # the largest number that was measured and fits

    def at(self, size: int) -> int:
        """The modelled peak in bytes for ``size`` examples."""
        return self._fixed + size * self._each

    def largest(self, least: int, most: int, room: int, measure: Callable[[int], int]) -> int:
        """The most examples, up to ``most``, that fit in ``room`` bytes.

        The result is measured, unless it is below ``least``.
        """
        while True:
            size = min(most, (room - self._fixed) // self._each)
            if size < least or size <= self._checked:
                return size
            peak = measure(size)
            if peak <= room:
                self._checked = size
            else:
                found = -(-(peak - self._fixed) // size)
                self._each = max(found, self._each + self._each // 64 + 1)


@dataclass
class Chunks:
    """How batches are cut into chunks, with a cache of measurements by signature of batches."""

    api: str  # the name for error messages
    chunk_size: int | None
    budget: Any  # bytes or a share, once checked
    randomness: str
    _fits: dict[Any, int] = field(default_factory=dict)  # the largest chunk that fits
    # The model for one chunk, that for several chunks, and the bytes of result per example.
    _lines: dict[Any, tuple[_Line, _Line, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        api = self.api
        if self.randomness not in ("error", "different", "same"):
            raise RuntimeError(
                f"{api}: randomness must be 'error', 'different' or 'same', got {self.randomness!r}"
            )
        if self.chunk_size is not None and self.budget is not None:
            raise ValueError(f"{api}: pass either chunk_size or budget, not both")
        if self.chunk_size is not None:
            size = validate.integer(self.chunk_size, f"{api}: chunk_size must be an int")
            if size <= 0:
                raise ValueError(f"{api}: chunk_size should be greater than 0, got {size}")
            self.chunk_size = size
        if self.budget is not None:
            self.budget = validate.checked_budget(self.budget, api)

    def run(self, batch: Batch, reduction: Reduction, make: Callable[[], Reduction]) -> None:
        """Run ``reduction`` on the examples of ``batch`` in chunks."""
        key, start = batch.signature(), 0
        chunk = min(self._size(batch, key, make), self._fits.get(key, batch.size))
        saved = random_state() if self.randomness == "same" else None
        while start < batch.size:
            if saved is not None:
                restore_random_state(saved)
            size = min(chunk, batch.size - start)
            run = functools.partial(reduction.stack_rows, batch.chunk(start, start + size))
            try:
                failure = out_of_memory(run, may_fail=size > 1)
                if failure is None:
                    start += size
                    failure = reduction.add()
            except (RuntimeError, MemoryError) as error:
                if size > 1:
                    self._advise(error, size)
                raise
            if failure is not None:
                self._fits[key] = chunk = max(1, size // 2)
                warn(
                    f"{self.api}: out of memory with {size} examples at a time, continuing with "
                    f"{chunk}. Pass chunk_size={chunk} or a budget to avoid this ({failure})"
                )

    def _advise(self, error: BaseException, size: int) -> None:
        """Add a note with the remedy to an error that was raised with several examples."""
        # Words in torch's errors for an operation that has no batching rule, or a wrong one.
        # "scalar type" comes from autocast inside decomposed operations, "workspace" from LSTMs.
        words = ("vmap", "batching rule", "doesn't match the broadcast shape", "data-dependent")
        shared = ("would mutate a captured Tensor", "is not possible because there exists a Tensor")
        text = str(error).lower()
        if is_out_of_memory(error):  # it was raised by `Reduction.add`
            error.add_note(
                f"{self.api}: memory ran out while a chunk was being added to the result, which "
                "can't be undone; call again with a smaller chunk_size"
            )
        elif any(sign in str(error) for sign in shared):
            error.add_note(
                f"{self.api}: the function writes to a tensor that all examples share (for example "
                "a buffer), which vmap can't do. With chunk_size=1 each example runs without vmap, "
                "and state such as counters works. State that makes one example depend on another, "
                "such as a moving average of the inputs, is refused then too; put the module in "
                "evaluation mode"
            )
        elif any(word in text for word in (*words, "sparse", "scalar type", "workspace")):
            error.add_note(
                f"{self.api}: vmap, which runs {size} examples at a time, can't do this; "
                "chunk_size=1 runs each example without vmap"
            )

    def _size(self, batch: Batch, key: Any, make: Callable[[], Reduction]) -> int:
        """The number of examples in a chunk."""
        if self.budget is None:
            return self.chunk_size or batch.size
        if _torch.tracing():
            raise RuntimeError(
                f"{self.api}: budget can't be used in a trace, where memory is not measured; pass "
                "chunk_size instead"
            )

        def of_one(chunk: int) -> int:
            return self._profile(batch, chunk, 1, make).peak

        def of_more(chunk: int) -> int:
            return self._profile(batch, chunk, 2, make).peak - 2 * chunk * result_bytes

        if key not in self._lines:
            two, four = (self._profile(batch, chunk, 2, make) for chunk in (2, 4))
            result_bytes = max(0, four.returned - two.returned) // 4
            more = _Line(two.peak - 4 * result_bytes, four.peak - 8 * result_bytes)
            self._lines[key] = _Line(of_one(2), of_one(4)), more, result_bytes
        one, more, result_bytes = self._lines[key]
        budget = int(self.budget * (one.at(batch.size) if isinstance(self.budget, float) else 1))
        # Try one chunk first. It is measured only if the model says that it fits.
        if one.largest(batch.size, batch.size, budget, of_one) == batch.size:
            return batch.size
        rest = batch.size * result_bytes
        chunk = more.largest(1, batch.size, budget - rest, of_more)
        # Avoid a last chunk of one example: it runs without vmap and may need more memory.
        while chunk > 2 and batch.size % chunk == 1:
            chunk -= 1
        if chunk > 2 or (chunk > 0 and batch.size % chunk == 0):
            return chunk
        alone = of_more(1) + rest if batch.size > 1 else of_one(1)
        if alone > budget:
            raise ValueError(
                f"{self.api}: budget={budget:,} bytes is too little: with one of {batch.size} "
                f"examples at a time the peak is {alone:,} bytes, {rest:,} of them for the result. "
                "Raise the budget, or recompute activations with functx.remat"
            )
        return max(chunk, 1)

    def _profile(
        self, batch: Batch, chunk: int, chunks: int, make: Callable[[], Reduction]
    ) -> memory.Profile:
        """Measure ``chunks`` chunks of ``chunk`` examples each."""
        saved = random_state()
        examples = batch.take(torch.arange(chunk * chunks) % batch.size)

        def run() -> Any:
            reduction = make()
            reduction.is_all = chunks == 1
            for start in range(0, examples.size, chunk):
                reduction.stack_rows(examples.chunk(start, start + chunk))
                reduction.add()
            return reduction.result(Counted(examples.size))

        try:
            return memory.profile(run)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                self._advise(error, chunk)
            raise
        finally:
            restore_random_state(saved)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a device or on the CPU."""
    words = ("not enough memory", "can't allocate memory", "out of memory")
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(word in str(error) for word in words)


def out_of_memory(run: Callable[[], None], may_fail: bool = True) -> str | None:
    """Call ``run``. Returns the error message if memory runs out, else ``None``.

    With ``may_fail=False`` the error is raised instead.
    """
    try:
        run()
        return None
    except (RuntimeError, MemoryError) as error:
        if not may_fail or not is_out_of_memory(error):
            raise
        failure = str(error).partition("\n")[0]
    # Outside the `except` block, the traceback and the tensors in its frames can be freed.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return failure


def warn(message: str) -> None:
    """Warn at the line of user code that called ``per_sample``."""
    file, line, _ = line_of(where())
    warnings.warn_explicit(message, RuntimeWarning, file, line)
