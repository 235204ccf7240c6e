"""Gradients of the examples of a chunk as one compiled graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from functx import _torch, _transforms, _tree
from functx._errors import TracingError
from functx._jit import jit
from functx.per_sample._batch import Batch
from functx.per_sample._batched_function import BatchedFunction
from functx.per_sample._chunks import followed, warn

# Examples of so many shapes are compiled for; after that it takes longer than it spares.
_SHAPES = 8


class CompiledGradients:
    """Runs one loss over chunks of one size as one graph each, by `functx.jit`.

    A chunk of few examples is small work for each operation, and what Python and the transforms add
    is paid for every chunk. Where the loss can't be traced, all runs in eager, with a warning.
    """

    def __init__(self, function: BatchedFunction, options: bool | Mapping[str, Any]) -> None:
        if not isinstance(options, (bool, Mapping)):
            raise TypeError(
                f"{function.api}: compile must be True or a dict of options of functx.jit, got "
                f"{options!r}"
            )
        if function.budget is not None:
            raise ValueError(
                f"{function.api}: no size of chunks is chosen for compiled code; give chunk_size "
                "with compile, instead of budget"
            )
        self._compiler: Callable[..., Any] = jit(**({} if options is True else options))
        self._function = function
        # The size of the chunks that are compiled, 0 for none, and their graph, by signatures.
        self._graphs: dict[Any, tuple[int, Callable[..., Any]]] = {}
        self._lock = threading.RLock()

    def run(self, batch: Batch) -> tuple[Any, Any, list[Any]] | None:
        """Values, auxiliary outputs and gradients by leaf; ``None`` if there is no graph."""
        if batch.size == 1:
            return None
        key, shapes = batch.signature(), len(self._graphs)
        if key not in self._graphs:
            if shapes == _SHAPES:
                self._warn(f"examples of more than {_SHAPES} shapes came; pad them")
            size = self._function.chunk_size or batch.size
            self._graphs[key] = size if shapes < _SHAPES else 0, self._graph_for(batch)
        size, graph = self._graphs[key]
        # Chunks of another size would have to be compiled too; and no graph is followed.
        if batch.size != size or _torch.dispatch_depth() or followed(batch.leaves):
            return None
        try:
            with self._lock:
                found, value = graph(batch.leaves, batch.kwargs)
        except TracingError as error:
            self._graphs[key] = 0, graph
            self._warn(str(error))
            return None
        value, aux = value if self._function.has_aux else (value, None)
        return value, aux, _tree.leaves(found)

    def _graph_for(self, batch: Batch) -> Callable[..., Any]:
        """The gradients of chunks like one, and their values."""
        # (What `gradients` reads is part of a graph's signature: nothing that changes.)
        form, randomness = replace(batch, leaves=[], kwargs={}), self._function.randomness
        has_aux = self._function.has_aux
        each = _transforms.grad_and_value(self._function.func, batch.positions, has_aux)

        def gradients(leaves: list[Any], kwargs: dict[str, Any]) -> Any:
            return replace(form, leaves=leaves, kwargs=kwargs).map(each, randomness)

        return self._compiler(gradients)

    def _warn(self, cause: str) -> None:
        api = self._function.api
        warn(f"{api}: compile=True has no effect here, chunks run in eager: {cause}")
