"""A call of a per-sample function: arguments sorted, batches cut, a job run over the chunks."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from functx import _validate
from functx.per_sample import _model
from functx.per_sample._batch import Batch, InDims, batch_of, kept_rows, split_batches
from functx.per_sample._chunks import Chunking, Job

MakeJob = Callable[[Batch], Job]
Func = Callable[..., Any] | torch.nn.Module | tuple[torch.nn.Module, Callable[..., Any]]


@dataclass(frozen=True)
class Call:
    """How a per-sample function takes its arguments.

    Attributes:
        func: What the user handed over, a function or a pair of module and criterion.
        in_dims: Where the examples are.
        shared: Positions that hold no examples if ``in_dims`` is ``None``; may count from the end.
        chunking: How to cut batches.
        api: The name for error messages.
        of_module: Whether `func` was made of a module, which was checked.
    """

    func: Any
    in_dims: InDims
    shared: tuple[int, ...]
    chunking: Chunking
    api: str
    of_module: bool = False

    def run(self, make_job: MakeJob, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the job that ``make_job`` makes for the first batch."""
        is_padding = kwargs.pop("is_padding_example", None)
        batches = split_batches(args)
        if batches is None:
            batches = iter([args])
        elif is_padding is not None:
            raise ValueError(
                f"{self.api}: is_padding_example goes with one batch, not with an iterator of them"
            )
        job: Job | None = None
        kept, total, seen = None, 0, 0
        for one in batches:
            batch = batch_of(one, kwargs, self.in_dims, self._positions(len(one)), self.api)
            kept = kept_rows(is_padding, batch.size, self.api)
            total += batch.size
            if kept is not None:
                batch = batch.take(kept)
            make = functools.partial(make_job, batch)
            job = job or make()
            one_by_one = batch.size == 1 or self.chunking.chunk_size == 1
            if not (one_by_one and self.of_module):
                self._check_whole(batch)
            if batch.size:
                self.chunking.run(replace(batch, start=seen), job, make)
            seen += batch.size
        if job is None:
            raise ValueError(f"{self.api}: the iterator has no batch")
        if not seen:  # what the loss returns has a shape also where there is no example
            job.run(invented(batch))
        return job.result(kept, total, empty=not seen)

    def _check_whole(self, batch: Batch) -> None:
        """Raises ``ValueError`` for parameters that are spread over processes."""
        if any(type(leaf).__name__ == "DTensor" for leaf in batch.leaves):
            raise ValueError(
                f"{self.api}: parameters are DTensors, which vmap can't run. Of a module in tensor "
                "parallelism give a pair (module, criterion) and chunk_size=1; or keep the whole "
                "module in every process, and add up with process_group"
            )

    def _positions(self, count: int) -> tuple[int, ...]:
        return _validate.resolve_argnums(self.shared, count, self.api) if self.shared else ()


def check_func(
    func: Func, api: str, *, outputs: bool = False
) -> tuple[Callable[..., Any], torch.nn.Module | None]:
    """A function of the parameters and one example, and the module it was made from, if any.

    Args:
        func: What the user handed over.
        api: The name for error messages.
        outputs: Whether any tensors may be returned, and a module does without a criterion.
    """
    if isinstance(func, (tuple, list)) and len(func) == 2:
        of_one = _model.outputs_of(*func) if outputs else _model.functional(*func)[0]
        return of_one, func[0]
    if isinstance(func, torch.nn.Module):
        if outputs:
            return _model.outputs_of(func), func
        raise TypeError(
            f"{api}: got the module {type(func).__name__} alone; pass a pair (module, criterion), "
            "or a function of parameters and one example"
        )
    _validate.check_callable(func, api)
    return func, None


def dims_of(
    module: torch.nn.Module | None, in_dims: InDims, argnums: _validate.Argnums, api: str
) -> InDims:
    """``in_dims`` with the parameters of a module, which the user leaves out.

    Raises:
        ValueError: Of a module something else is to be differentiated, or ``in_dims`` is an int.
    """
    if module is None:
        return in_dims
    if argnums != 0:
        raise ValueError(f"{api}: of a module the parameters are differentiated, argnums={argnums}")
    if isinstance(in_dims, int):
        raise ValueError(f"{api}: in_dims of a module must be a tuple, an entry for each argument")
    return None if in_dims is None else (None, *in_dims)


@contextmanager
def module_arguments(
    module: torch.nn.Module | None, args: tuple[Any, ...]
) -> Iterator[tuple[Any, ...]]:
    """The arguments with the module's parameters in front; nothing of it is recorded outside.

    One thread at a time: while the module runs, others' parameters are in the place of its own.
    """
    if module is None:
        yield args
        return
    with _LOCK:
        lock = _LOCKS.setdefault(module, threading.RLock())
    with lock, torch.no_grad():
        yield (_model.trainable(module), *args)


_LOCK = threading.Lock()
_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def invented(batch: Batch) -> Batch:
    """A batch of one example of zeros, like those that are missing."""
    leaves = [
        leaf if dim is None else leaf.new_zeros(*leaf.shape[:dim], 1, *leaf.shape[dim + 1 :])
        for leaf, dim in zip(batch.leaves, batch.dims)
    ]
    return replace(batch, leaves=leaves, size=1)
