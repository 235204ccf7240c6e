"""A call of a per-sample function: arguments checked, batches cut, a job run over the chunks."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from functx import _validate
from functx._validate import Argnums
from functx.per_sample import _model
from functx.per_sample._batch import Batch, InDims, batch_of, kept_rows, split_batches
from functx.per_sample._chunks import Chunking, Job

MakeJob = Callable[[Batch], Job]
Func = Callable[..., Any] | torch.nn.Module | tuple[torch.nn.Module, Callable[..., Any]]

_LOCK = threading.Lock()
_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class PerSample:
    """What all functions of ``per_sample`` are made of: a function of one example, and options.

    Attributes:
        func: The function of one example; of a module, it takes the parameters first.
        module: The module that it was made of, if any.
        argnums: The differentiated arguments; ``()`` where nothing is.
        in_dims: Where the examples are; ``None`` for all but the differentiated arguments.
        chunking: How to cut batches.
        api: The name for error messages.
        has_aux: Whether `func` returns ``(value, aux)``.
        compiled: Runs chunks compiled, if that was asked for.
        hints: By signatures of batches, what was measured: whether factors are worth looking for,
            and whether two passes are the better way.
    """

    func: Callable[..., Any]
    module: torch.nn.Module | None
    argnums: Argnums
    in_dims: InDims
    chunking: Chunking
    api: str
    has_aux: bool = False
    compiled: Any = None
    hints: dict[Any, bool] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        api: str,
        func: Func,
        argnums: Argnums,
        in_dims: InDims,
        chunk_size: int | None,
        memory_budget: int | None,
        randomness: str,
        *,
        outputs: bool = False,
    ) -> PerSample:
        """Checks what the user handed over; with ``outputs`` a module needs no criterion."""
        module: Any = None
        if isinstance(func, (tuple, list)) and len(func) == 2:
            module, _ = func
            of_one = _model.outputs_of(*func) if outputs else _model.functional(*func)[0]
        elif isinstance(func, torch.nn.Module):
            if not outputs:
                raise TypeError(
                    f"{api}: got the module {type(func).__name__} alone; pass a pair (module, "
                    "criterion), or a function of parameters and one example"
                )
            module, of_one = func, _model.outputs_of(func)
        else:
            _validate.check_callable(func, api)
            of_one = func
        if argnums != ():  # nothing is differentiated
            _validate.check_argnums(argnums, api)
        if module is not None:
            if argnums != 0:
                raise ValueError(
                    f"{api}: of a module the parameters are differentiated, argnums={argnums}"
                )
            if isinstance(in_dims, int):
                raise ValueError(
                    f"{api}: in_dims of a module must be a tuple, an entry for each argument"
                )
            in_dims = None if in_dims is None else (None, *in_dims)
        chunking = Chunking(chunk_size, memory_budget, randomness, api)
        return cls(of_one, module, argnums, in_dims, chunking, api)

    def over_batch(
        self, make_job: MakeJob, finish: Callable[[Any], Any] = lambda result: result
    ) -> Callable[..., Any]:
        """A function of a batch: what `finish` makes of a job's result."""

        @functools.wraps(self.func, updated=())
        def of_batch(*args: Any, **kwargs: Any) -> Any:
            with self.arguments(args) as args:
                return finish(self.run(make_job, args, kwargs))

        return of_batch

    @contextmanager
    def arguments(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """The arguments with the module's parameters in front; nothing is recorded outside.

        One thread at a time: while the module runs, others' parameters are in the place of its own.
        """
        if self.module is None:
            yield args
            return
        with _LOCK:
            lock = _LOCKS.setdefault(self.module, threading.RLock())
        with lock, torch.no_grad():
            yield (_model.trainable(self.module), *args)

    def positions(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The positions of the differentiated arguments."""
        return _validate.resolve_argnums(self.argnums, len(args), self.api)

    def differentiated(self, batch: Batch) -> Any:
        """The differentiated argument, or the tuple of them."""
        args = batch.args()
        chosen = tuple(args[position] for position in batch.positions)
        return chosen[0] if isinstance(self.argnums, int) else chosen

    def batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """The arguments, with the examples found in them."""
        return batch_of(args, kwargs, self.in_dims, self.positions(args), self.api)

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
            batch = self.batch(one, kwargs)
            kept = kept_rows(is_padding, batch.size, self.api)
            total += batch.size
            if kept is not None:
                batch = batch.take(kept)
            make = functools.partial(make_job, batch)
            job = job or make()
            self._check_whole(batch)
            if batch.size:
                batch = replace(batch, start=seen, whole=(seen, batch.size))
                self.chunking.run(batch, job, make)
            seen += batch.size
        if job is None:
            raise ValueError(f"{self.api}: the iterator has no batch")
        if not seen:  # what the loss returns has a shape also where there is no example
            commit = job.run(batch.zeros())
            if commit is not None:
                commit(lambda size, failure: None)
        return job.result(kept, total, not seen)

    def _check_whole(self, batch: Batch) -> None:
        """Raises ``ValueError`` for parameters that are spread over processes."""
        one_by_one = batch.size == 1 or self.chunking.chunk_size == 1
        if one_by_one and self.module is not None:
            return
        if any(type(leaf).__name__ == "DTensor" for leaf in batch.leaves):
            raise ValueError(
                f"{self.api}: parameters are DTensors, which vmap can't run. Of a module in tensor "
                "parallelism give a pair (module, criterion) and chunk_size=1; or keep the whole "
                "module in every process, and add up with process_group"
            )
