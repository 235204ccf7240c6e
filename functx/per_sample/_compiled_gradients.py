"""Gradients of the examples of a chunk as one compiled graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from functx import _torch, _transforms, _tree
from functx._errors import TracingError
from functx._jit import jit
from functx.per_sample._batch import Batch
from functx.per_sample._batched_function import BatchedFunction
from functx.per_sample._chunks import warn

# Examples of so many shapes are compiled for; after that it takes longer than it spares.
_SHAPES = 8


class CompiledGradients:
    """Runs one loss over chunks of one size as one graph each, by `functx.jit`.

    A chunk of few examples is small work for each operation, and what Python and the transforms add
    is paid for every chunk. Where the loss can't be traced, all runs in eager, with a warning.
    """

    def __init__(self, function: BatchedFunction, options: Mapping[str, Any]) -> None:
        self._compiler: Callable[..., Any] = jit(**options)
        self._function = function
        # The size of the chunks that are compiled, 0 for none, and their graph, by signatures.
        self._graphs: dict[Any, tuple[int, Callable[..., Any]]] = {}
        self._warned = False
        self._lock = threading.RLock()

    def run(self, batch: Batch) -> tuple[Any, Any, list[Any]] | None:
        """Values, auxiliary outputs and gradients by leaf; ``None`` if there is no graph."""
        if batch.size == 1:
            return None
        key = batch.signature()
        if key not in self._graphs:
            if len(self._graphs) >= _SHAPES:
                self._warn(f"examples of more than {_SHAPES} shapes came; pad them")
                return None
            self._graphs[key] = self._function.chunk_size or batch.size, self._graph_for(batch)
        size, graph = self._graphs[key]
        # Chunks of another size would have to be compiled too.
        if batch.size != size or _is_followed(batch):
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
        form, randomness = replace(batch, leaves=[], kwargs={}), self._function.randomness
        has_aux = self._function.has_aux
        each = _transforms.grad_and_value(self._function.func, batch.positions, has_aux)

        def gradients(leaves: list[Any], kwargs: dict[str, Any]) -> Any:
            return replace(form, leaves=leaves, kwargs=kwargs).map(each, randomness)

        return self._compiler(gradients)

    def _warn(self, cause: str) -> None:
        if not self._warned:
            self._warned = True
            api = self._function.api
            warn(f"{api}: compile=True has no effect here, chunks run in eager: {cause}")


def _is_followed(batch: Batch) -> bool:
    """Whether something looks at operations, or differentiates what is made of the arguments."""
    if _torch.transforming() or _torch.dispatch_depth() or _torch.dual_level() >= 0:
        return True
    leaves = (leaf for leaf in batch.leaves if isinstance(leaf, torch.Tensor))
    return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)


def compiled_by(
    function: BatchedFunction, compile: bool | Mapping[str, Any]
) -> CompiledGradients | None:
    """What the option asks for."""
    if not isinstance(compile, (bool, Mapping)):
        raise TypeError(
            f"{function.api}: compile must be True or a dict of options of functx.jit, got "
            f"{compile!r}"
        )
    if function.budget is not None and compile is not False:
        raise ValueError(
            f"{function.api}: no size of chunks is chosen for compiled code; give chunk_size with "
            "compile, instead of budget"
        )
    return (
        None
        if compile is False
        else CompiledGradients(function, {} if compile is True else compile)
    )
