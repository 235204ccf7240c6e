"""A function of one example as a function of a batch: options and arguments checked, chunks run."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from functx._core import Argnums, validate
from functx.per_sample._batch import (
    Batch,
    ChunkedCall,
    Counted,
    InDims,
    batch_of,
    kept_rows,
    split_batches,
)
from functx.per_sample._chunks import Chunks, Reduction
from functx.per_sample._embeddings import has_special_embeddings
from functx.per_sample._module_loss import module_loss, own_buffers, trainable

Func = Callable[..., Any] | torch.nn.Module | tuple[torch.nn.Module, Callable[..., Any]]

_LOCK = threading.Lock()
_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


@dataclass
class BatchedFunction:
    """A function of one example, and the options that all functions of ``per_sample`` have."""

    func: Any  # once checked, one that takes the parameters of a module first
    argnums: Argnums | None  # None where nothing is differentiated
    in_dims: InDims
    chunks: Chunks
    outputs: bool = False  # whether any tensors may be returned, and a module needs no criterion
    has_aux: bool = False
    compiled: Any = None  # runs chunks compiled, if that was asked for
    # Whether factors of gradients are worth looking for, by signatures of batches.
    worth_factors: dict[Any, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.api, func = self.chunks.api, self.func
        api = self.api
        self._module: torch.nn.Module | None = None
        if isinstance(func, torch.nn.Module) and self.outputs:
            func = func, lambda output, *targets: output
        if isinstance(func, (tuple, list)) and len(func) == 2:
            self._module, self.func = func[0], module_loss(func[0], func[1], self.outputs)
        elif isinstance(func, torch.nn.Module) and self.argnums is not None:
            raise TypeError(
                f"{api}: got the module {type(func).__name__} alone; pass a pair (module, "
                "criterion), or a function of parameters and one example"
            )
        validate.check_callable(self.func, api)
        if self.argnums is not None:
            validate.check_argnums(self.argnums, api)
        if self._module is not None:
            if self.argnums != 0:
                raise ValueError(
                    f"{api}: of a module the parameters are differentiated, argnums={self.argnums}"
                )
            if isinstance(self.in_dims, int):
                raise ValueError(
                    f"{api}: in_dims of a module must be a tuple, an entry for each argument"
                )
            self.in_dims = None if self.in_dims is None else (None, *self.in_dims)

    def over_batch(self, make: Callable[[Batch], Reduction]) -> Callable[..., Any]:
        """A function of a batch: the result of a reduction."""

        @functools.wraps(self.func, updated=())
        def of_batch(*args: Any, **kwargs: Any) -> Any:
            with self.arguments(args) as args:
                return self.run(make, args, kwargs)

        return of_batch

    @contextmanager
    def arguments(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """The arguments with the module's parameters in front; nothing is recorded outside.

        One thread at a time: while the module runs, others' parameters are in the place of its own.
        """
        if self._module is None:
            yield args
            return
        with _LOCK:
            lock = _LOCKS.setdefault(self._module, threading.RLock())
        with lock, torch.no_grad(), own_buffers(self._module, self.api):
            yield (trainable(self._module), *args)

    def positions(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The positions of the differentiated arguments."""
        argnums = () if self.argnums is None else self.argnums
        return validate.resolve_argnums(argnums, len(args), self.api)

    def batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """The arguments, with the examples found in them."""
        return batch_of(args, kwargs, self.in_dims, self.positions(args), self.api)

    def differentiated(self, batch: Batch) -> Any:
        """The differentiated argument, or the tuple of them."""
        args = batch.given
        chosen = tuple(args[position] for position in batch.positions)
        return chosen[0] if isinstance(self.argnums, int) else chosen

    def run(
        self, make: Callable[[Batch], Reduction], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of the reduction that ``make`` makes for the first batch."""
        is_padding = kwargs.pop("is_padding_example", None)
        batches = split_batches(args)
        if batches is not None and is_padding is not None:
            raise ValueError(
                f"{self.api}: is_padding_example goes with one batch, not with an iterator of them"
            )
        reduction: Reduction | None = None
        kept, total, seen = None, 0, 0
        special = self._module is not None and has_special_embeddings(self._module)
        call = ChunkedCall(self.api, self._module, special, batches is not None)
        for one in [args] if batches is None else batches:
            batch = replace(self.batch(one, kwargs), call=call)
            kept = kept_rows(is_padding, batch.size, self.api)
            total += batch.size
            if kept is not None:
                batch = replace(batch.take(kept), call=call)
            make_again = functools.partial(make, batch)
            reduction = reduction or make_again()
            self._check_whole(batch)
            if batch.size:
                batch = replace(batch, start=seen, whole=(seen, batch.size))
                self.chunks.run(batch, reduction, make_again)
            seen += batch.size
        if reduction is None:
            raise ValueError(f"{self.api}: the iterator has no batch; it may be used up")
        if not seen:  # what the loss returns has a shape also where there is no example
            reduction.stack_rows(batch.zeros())
            reduction.add()
        return reduction.result(Counted(total, kept, empty=not seen))

    def _check_whole(self, batch: Batch) -> None:
        """Raises ``ValueError`` for parameters that are spread over processes."""
        if self._module is not None and 1 in (batch.size, self.chunks.chunk_size):
            return
        if any(type(leaf).__name__ == "DTensor" for leaf in batch.leaves):
            raise ValueError(
                f"{self.api}: parameters are DTensors, which vmap can't run. Of a module in tensor "
                "parallelism give a pair (module, criterion) and chunk_size=1; or keep the whole "
                "module in every process, and add up with process_group"
            )
