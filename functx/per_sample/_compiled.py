"""The gradients of a chunk by `functx.jit`.

A chunk of few examples is small work for each operation, and what Python and the transforms add is
paid for every chunk. Compiled, a chunk is one graph: what is elementwise is fused, and nothing is
dispatched. Where the loss can't be traced, all runs in eager, with a warning that names the cause.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from functx import _torch, _transforms, _tree
from functx._errors import TracingError
from functx._jit import jit
from functx.per_sample._batch import Batch
from functx.per_sample._chunks import outside

# Examples of so many shapes are compiled for; after that it takes longer than it spares.
_SHAPES = 8


class Compiled:
    """Runs one loss over chunks of one size, compiled.

    Args:
        options: of `functx.jit`.
        chunk_size: of the chunks; that of the first one if ``None``.
        api: the name for messages.
    """

    def __init__(self, options: Mapping[str, Any], chunk_size: int | None, api: str) -> None:
        self._compiler: Callable[..., Any] = jit(**options)
        self._chunk_size, self._api = chunk_size, api
        self._sizes: dict[Any, int] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._gave_up = self._warned = False
        self._lock = threading.RLock()

    def serves(self, batch: Batch) -> bool:
        """Whether a chunk may run compiled; those of other sizes would each have to be compiled."""
        signature = batch.signature()
        if signature not in self._sizes and len(self._sizes) >= _SHAPES:
            self._warn(f"examples of more than {_SHAPES} shapes came; pad them")
            return False
        size = self._sizes.setdefault(signature, self._chunk_size or batch.size)
        if self._gave_up or batch.size != size or size == 1:
            return False
        if _torch.transforming() or _torch.dispatch_depth() or _torch.dual_level() >= 0:
            return False
        leaves = (leaf for leaf in batch.leaves if isinstance(leaf, torch.Tensor))
        return not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in leaves)

    def rows(self, loss: Any, batch: Batch) -> tuple[Any, Any, list[Any]] | None:
        """Values, auxiliary outputs and the gradients of each leaf; ``None`` if there is no graph.

        Args:
            loss: a `Loss`.
            batch: the chunk.
        """
        with self._lock:
            if self._gave_up:
                return None
            key = batch.signature(), batch.spec, loss.positions
            if key not in self._functions:
                self._functions[key] = self._compiler(_gradients_of(loss, batch))
            try:
                gradients, (value, aux) = self._functions[key](batch.leaves, batch.kwargs)
            except TracingError as error:
                self._gave_up = True
                self._warn(str(error))
                return None
        return value, aux, _tree.leaves(gradients)

    def _warn(self, cause: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._api}: compile=True has no effect here, chunks run in eager: {cause}",
                RuntimeWarning,
                stacklevel=outside(),
            )


def _gradients_of(loss: Any, batch: Batch) -> Callable[..., Any]:
    """A function of the leaves of a chunk and its keyword arguments."""
    each = _transforms.grad_and_value(loss.func, loss.positions, loss.has_aux)
    form, randomness, has_aux = replace(batch, leaves=[], kwargs={}), loss.randomness, loss.has_aux

    def gradients(leaves: list[Any], kwargs: dict[str, Any]) -> Any:
        found, value = replace(form, leaves=leaves, kwargs=kwargs).map(each, randomness)
        return found, value if has_aux else (value, None)

    return gradients


def compiled_by(
    compile: bool | Mapping[str, Any], chunk_size: int | None, memory_budget: int | None, api: str
) -> Compiled | None:
    """What the option asks for.

    Raises:
        TypeError: neither a bool nor a mapping of options of `functx.jit`.
        ValueError: there is a memory budget.
    """
    if not isinstance(compile, (bool, Mapping)):
        raise TypeError(
            f"{api}: compile must be True or a dict of options of functx.jit, got {compile!r}"
        )
    if compile is False:
        return None
    if memory_budget is not None:
        raise ValueError(
            f"{api}: no size of chunks is chosen for compiled code; give chunk_size with compile, "
            "instead of memory_budget"
        )
    return Compiled({} if compile is True else compile, chunk_size, api)
