"""Compute the per-example gradients of a chunk, parameter by parameter.

The gradient of a parameter is complete when all uses of the parameter have been pulled back. At
that moment it is passed to `Arrivals`. If only its norm is needed, it is freed before the gradients
of other parameters are computed. (Hooks on modules would not do: they see the gradient of each
*use*, and the norm of a sum is not the sum of the norms.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from functx import _torch
from functx._compile import jit
from functx._core import TracingError, tree, validate
from functx._transforms import Pullback, derivatives, record
from functx.per_sample._batch import Batch, random_state, restore_random_state
from functx.per_sample._batched_function import BatchedFunction
from functx.per_sample._chunks import followed, is_out_of_memory, warn
from functx.per_sample._outer_products import KeepFactors, rows_of
from functx.per_sample._sums import Factored, Rows, squared_norms

# Look for factors only if they save this share of the elements of all gradients.
_WORTH = 0.2
# Compile for at most this many shapes of examples. With more, compiling takes longer than it saves.
_SHAPES = 8


@dataclass
class Arrivals:
    """Collects the gradients of one chunk: squared norms by group, and the gradients if needed."""

    groups: list[int] | None  # for each leaf, the number of its group; None if norms are not needed
    dtype: torch.dtype  # the dtype of squared norms
    keeps_gradients: bool  # whether the gradients themselves are needed
    factors: bool  # whether gradients may be represented by factors
    values: Any = field(init=False)  # the losses, of shape (c,)
    aux: list[Any] = field(init=False)  # leaves of shape (c, ...)
    structure: Any = field(init=False)  # the structure of the aux of one example
    squares: dict[int, torch.Tensor] = field(init=False, default_factory=dict)  # by group
    gradients: dict[int, Rows] = field(init=False, default_factory=dict)  # by leaf
    numbers: int = field(init=False, default=0)  # the elements of all gradients
    spared: int = field(init=False, default=0)  # the elements of gradients that are factors

    def add(self, leaf: int, rows: Rows) -> None:
        """Add the gradients with respect to one leaf, of shape ``(c, *leaf.shape)``."""
        if self.groups is not None:
            group, square = self.groups[leaf], squared_norms(rows, self.dtype)
            self.squares[group] = self.squares[group] + square if group in self.squares else square
        self.numbers += rows.shape.numel()
        self.spared += rows.shape.numel() * isinstance(rows, Factored)
        if self.keeps_gradients:
            self.gradients[leaf] = rows


def chunk_gradients(function: BatchedFunction, batch: Batch, arrivals: Arrivals) -> Arrivals:
    """Run the loss on each example, and pass the gradients to ``arrivals``, which is empty.

    Returns ``arrivals``, or a fresh copy of it if the chunk had to run again.
    """
    key, hints = (batch.alone, batch.signature()), function.worth_factors
    if function.compiled is not None and (found := function.compiled.run(batch)) is not None:
        arrivals.values, arrivals.aux, arrivals.structure, rows = found
        for leaf in range(len(rows)):
            arrivals.add(leaf, rows[leaf])
            rows[leaf] = None
        return arrivals
    if arrivals.factors and not _torch.transforming() and hints.get(key, True):
        mode = KeepFactors(batch.size)
        before = random_state() if function.chunks.randomness != "error" else None
        try:
            _pull_back(function, batch, arrivals, mode)
            # The dispatch mode costs time at every operation. How much it saves depends on shapes.
            hints[key] = arrivals.spared >= _WORTH * arrivals.numbers
            return arrivals
        except (RuntimeError, TypeError, ValueError) as error:
            # Code that accesses the memory of a gradient fails if that gradient is represented by
            # factors. So run again without factors; errors with other causes are then raised again.
            if not mode.factors or is_out_of_memory(error):
                raise
        hints[key] = False
        arrivals = replace(arrivals)
        if before is not None:
            restore_random_state(before)
    _pull_back(function, batch, arrivals, None)
    return arrivals


def _pull_back(
    function: BatchedFunction, batch: Batch, arrivals: Arrivals, mode: KeepFactors | None
) -> None:
    """Run the loss and pull back, with ``vmap`` or, for a single example, without."""
    alone = batch.alone
    # Plain autograd is enough if nothing around the call can differentiate the result.
    recording = torch.is_grad_enabled() or _torch.dual_level() >= 0
    plain = alone and not recording and not torch.is_inference_mode_enabled()

    def example(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        level = None if alone else _torch.current_interpreter().level()

        def take(leaf: int, gradient: torch.Tensor) -> None:
            if alone:
                batch.call.carried.check([gradient])
            with mode.paused() if mode else nullcontext():
                whole = gradient if level is None else _rows(gradient, level, batch.size)
                rows = rows_of(_dense(whole).unsqueeze(0) if alone else whole)
                arrivals.add(leaf, rows)

        value, aux, pullback = _recorded(function, args, kwargs, batch.positions, plain)
        ones = torch.ones_like(value)
        if mode is None and arrivals.keeps_gradients:
            # All gradients of the chunk are kept until its end, so a hook for each gains nothing.
            gradients = pullback.gradients(ones)
            for leaf in range(len(gradients)):
                if (gradient := gradients[leaf]) is not None:
                    gradients[leaf] = None
                    take(leaf, gradient)
        else:
            with mode.pulling_back() if mode else nullcontext():
                pullback.feed(ones, take)
        flat, arrivals.structure = tree.flatten(aux if function.has_aux else ())
        return value, [*map(_tensor, flat)]

    (arrivals.values, *arrivals.aux), _ = batch.map(example, function.chunks.randomness)


def _recorded(
    function: BatchedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: tuple[int, ...],
    plain: bool,
) -> tuple[Any, Any, Pullback]:
    """The loss of one example, its aux, and the pullback; if ``plain``, from plain autograd."""
    if not plain:
        check = functools.partial(validate.check_scalar, api=function.api)
        options: dict[str, Any] = {"has_aux": function.has_aux, "api": function.api, "once": True}
        return record(function.func, args, kwargs, positions, check_output=check, **options)
    with torch.enable_grad():
        arguments = [
            tree.map_(lambda leaf: leaf.detach().requires_grad_(), arg) if at in positions else arg
            for at, arg in enumerate(args)
        ]
        output, aux = function.func(*arguments, **kwargs), None
        if function.has_aux:
            output, aux = validate.split_aux(output, function.api)
        validate.check_scalar(output, function.api)
    pullback = Pullback(tuple(arguments[at] for at in positions), *tree.flatten(output))
    aux = tree.map_(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, aux)
    return output.detach(), aux, pullback


def _rows(gradient: torch.Tensor, level: int, size: int) -> torch.Tensor:
    """The gradients of all examples, ``(c, *leaf.shape)``, from the tensor that ``vmap`` maps."""
    if _torch.is_batched(gradient) and _torch.level_of(gradient) == level:
        value, dim = _torch.unwrap_batch(gradient, level)
        assert dim is not None
        return value.movedim(dim, 0) if dim else value
    return gradient.expand(size, *gradient.shape)  # it is the same for all examples


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Convert a sparse gradient or a DTensor to a dense local tensor, as norms need it."""
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _tensor(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise ValueError(
            f"per_sample: expected aux to consist of tensors, got {validate.describe(leaf)} of "
            f"type {type(leaf).__name__}"
        )
    return leaf


class CompiledGradients:
    """Compiles the gradients of a chunk as one graph, by `functx.jit`, for chunks of one size.

    With few examples in a chunk, each operation does little work, and the overhead of Python and of
    the transforms is paid for every chunk. If the loss can't be traced, chunks run in eager, with a
    warning.
    """

    def __init__(self, function: BatchedFunction, options: bool | Mapping[str, Any]) -> None:
        if not isinstance(options, (bool, Mapping)):
            raise TypeError(
                f"{function.api}: compile must be True or a dict of options of functx.jit, got "
                f"{options!r}"
            )
        if function.chunks.budget is not None:
            raise ValueError(
                f"{function.api}: budget can't be used with compile; pass chunk_size instead"
            )
        self._compiler: Callable[..., Any] = jit(**({} if isinstance(options, bool) else options))
        self._function = function
        # By signature: the size of compiled chunks, 0 if there is no graph, and the graph.
        self._graphs: dict[Any, tuple[int, Callable[..., Any]]] = {}
        self._lock = threading.RLock()

    def run(self, batch: Batch) -> tuple[Any, list[Any], Any, list[Any]] | None:
        """Run a compiled chunk; ``None`` if there is no graph for it.

        Returns the losses, the leaves and the structure of aux, and the gradients by leaf.
        """
        if batch.size == 1:
            return None
        key, shapes = batch.signature(), len(self._graphs)
        if key not in self._graphs:
            if shapes == _SHAPES:
                self._warn(
                    f"there are examples of more than {_SHAPES} shapes; pad them to fewer shapes"
                )
            size = self._function.chunks.chunk_size or batch.size
            self._graphs[key] = size if shapes < _SHAPES else 0, self._graph_for(batch)
        size, graph = self._graphs[key]
        # Chunks of another size would need another graph, and recorded operations run in eager.
        if batch.size != size or _torch.dispatch_depth() or followed(batch.leaves):
            return None
        try:
            with self._lock:
                rows, value, aux, structure = graph(batch.leaves, batch.kwargs)
        except TracingError as error:
            self._graphs[key] = 0, graph
            self._warn(str(error))
            return None
        return value, aux, structure, rows

    def _graph_for(self, batch: Batch) -> Callable[..., Any]:
        """Compile a function that returns the gradients and losses of chunks like ``batch``."""
        # `gradients` closes over a batch without tensors, since jit guards captured values.
        form = replace(batch, args=(), leaves=[], kwargs={})
        randomness = self._function.chunks.randomness
        has_aux = self._function.has_aux
        grad_and_value = derivatives.grad_and_value(self._function.func, batch.positions, has_aux)

        def gradients(leaves: list[Any], kwargs: dict[str, Any]) -> Any:
            structure: Any = None

            def each(*args: Any, **kwargs: Any) -> Any:
                nonlocal structure
                found, value = grad_and_value(*args, **kwargs)
                value, aux = value if has_aux else (value, ())
                flat, structure = tree.flatten(aux)
                return value, flat, tree.leaves(found)

            own = replace(form, leaves=leaves, kwargs=kwargs)
            (value, *rest), _ = own.map(each, randomness)
            aux = rest[: structure.num_leaves]
            return rest[len(aux) :], value, aux, structure

        return self._compiler(gradients)

    def _warn(self, cause: str) -> None:
        api = self._function.api
        warn(f"{api}: compile=True has no effect here, and chunks run in eager: {cause}")
