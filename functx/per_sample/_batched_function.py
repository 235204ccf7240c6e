"""Turn a function of one example into a function of a batch: check arguments, run chunks."""

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
    counted_rows,
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

    func: Any  # for a module, replaced by a function that takes its parameters first
    argnums: Argnums | None  # None if nothing is differentiated
    in_dims: InDims
    chunks: Chunks
    outputs: bool = False  # whether the result may be any tensors, without a criterion
    has_aux: bool = False
    compiled: Any = None  # runs compiled chunks, if the caller passed ``compile``
    # By signature of a batch, whether it is worth looking for factors of gradients.
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
                f"{api}: got the module {type(func).__name__} without a criterion; pass a pair "
                "(module, criterion), or a function of parameters and one example"
            )
        validate.check_callable(self.func, api)
        if self.argnums is not None:
            validate.check_argnums(self.argnums, api)
        if self._module is not None:
            if self.argnums != 0:
                raise ValueError(
                    f"{api}: with a module, its parameters are differentiated; leave out "
                    f"argnums={self.argnums}"
                )
            if isinstance(self.in_dims, int):
                raise ValueError(
                    f"{api}: with a module, in_dims must be a tuple with an entry for each argument"
                )
            self.in_dims = None if self.in_dims is None else (None, *self.in_dims)

    def over_batch(self, make: Callable[[Batch], Reduction]) -> Callable[..., Any]:
        """A function of a batch that runs the reduction of ``make`` and returns its result."""

        @functools.wraps(self.func, updated=())
        def of_batch(*args: Any, **kwargs: Any) -> Any:
            with self.arguments(args) as args:
                return self.run(make, args, kwargs)

        return of_batch

    @contextmanager
    def arguments(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """A context with the arguments of a call, preceded by the parameters of a module.

        With a module, outer autograd records nothing. Threads take turns for one module, because
        its parameters are replaced while it runs.
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
        """Find the examples in the arguments."""
        return batch_of(args, kwargs, self.in_dims, self.positions(args), self.api)

    def differentiated(self, batch: Batch) -> Any:
        """The differentiated argument, or the tuple of them."""
        args = batch.args
        chosen = tuple(args[position] for position in batch.positions)
        return chosen[0] if isinstance(self.argnums, int) else chosen

    def run(
        self, make: Callable[[Batch], Reduction], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run all batches; returns the result of the reduction, which ``make`` makes."""
        is_padding = kwargs.pop("is_padding_example", None)
        batches = split_batches(args)
        if batches is not None and is_padding is not None:
            raise ValueError(
                f"{self.api}: is_padding_example can be used with one batch, not with an iterator "
                "of batches"
            )
        reduction: Reduction | None = None
        counted, total, seen = None, 0, 0
        special = self._module is not None and has_special_embeddings(self._module)
        call = ChunkedCall(self.api, self._module, special, batches is not None)
        for one in [args] if batches is None else batches:
            batch = replace(self.batch(one, kwargs), call=call)
            counted = counted_rows(is_padding, batch.size, self.api)
            total += batch.size
            if counted is not None:
                batch = replace(batch.take(counted), call=call)
            make_again = functools.partial(make, batch)
            reduction = reduction or make_again()
            self._check_whole(batch)
            if batch.size:
                batch = replace(batch, start=seen, whole=(seen, batch.size))
                self.chunks.run(batch, reduction, make_again)
            seen += batch.size
        if reduction is None:
            raise ValueError(
                f"{self.api}: the iterator has no batch; it may be exhausted. Pass a new one"
            )
        if not seen:  # run one example of zeros to find the shapes of the result
            reduction.stack_rows(batch.zeros())
            reduction.add()
        return reduction.result(Counted(total, counted, empty=not seen))

    def _check_whole(self, batch: Batch) -> None:
        """Raises ``ValueError`` if parameters are DTensors and would run under ``vmap``."""
        if self._module is not None and 1 in (batch.size, self.chunks.chunk_size):
            return
        if any(type(leaf).__name__ == "DTensor" for leaf in batch.leaves):
            raise ValueError(
                f"{self.api}: parameters are DTensors, which vmap can't run. For a module in "
                "tensor parallelism, pass a pair (module, criterion) and chunk_size=1; or keep the "
                "whole module in every process, and pass process_group to sum over processes"
            )
