"""Per-example gradients of a few examples, each handed over as soon as it is complete.

A gradient of one parameter is complete when all uses of the parameter have been pulled back. It is
handed to `Arrivals` there and then: what these do not keep never exists together with the gradients
of the other parameters. (A node on every *use*, as hooks on modules are, would see parts of a
gradient; the norm of a sum is no sum of norms.)
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

# Factors are looked for where they spare this much of all gradients' numbers.
_WORTH = 0.2
# Examples of so many shapes are compiled for; after that it takes longer than it spares.
_SHAPES = 8


@dataclass
class Arrivals:
    """The gradients of one chunk as they arrive: squared norms by group, and what is kept."""

    groups: list[int] | None  # for each leaf the number of its group; None where no norms are taken
    dtype: torch.dtype  # of squared norms
    keeps: bool  # whether gradients are kept
    factors: bool  # whether they may be known by factors
    values: Any = field(init=False)  # the losses, of shape (c,)
    aux: list[Any] = field(init=False)  # leaves of shape (c, ...)
    structure: Any = field(init=False)  # of the aux of one example
    squares: dict[int, torch.Tensor] = field(init=False, default_factory=dict)  # by group
    kept: dict[int, Rows] = field(init=False, default_factory=dict)  # by leaf
    numbers: int = field(init=False, default=0)  # of all gradients
    spared: int = field(init=False, default=0)  # of gradients known by their factors

    def gradient(self, leaf: int, rows: Rows) -> None:
        """Take the gradients by one leaf, of shape ``(c, *leaf.shape)``."""
        if self.groups is not None:
            group, square = self.groups[leaf], squared_norms(rows, self.dtype)
            self.squares[group] = self.squares[group] + square if group in self.squares else square
        self.numbers += rows.shape.numel()
        self.spared += rows.shape.numel() * isinstance(rows, Factored)
        if self.keeps:
            self.kept[leaf] = rows


def chunk_gradients(function: BatchedFunction, batch: Batch, arrivals: Arrivals) -> Arrivals:
    """Runs the loss on each example, and hands over the gradients to new ``arrivals``."""
    key, hints = (batch.alone, batch.signature()), function.worth_factors
    if function.compiled is not None and (found := function.compiled.run(batch)) is not None:
        arrivals.values, arrivals.aux, arrivals.structure, rows = found
        for leaf in range(len(rows)):
            arrivals.gradient(leaf, rows[leaf])
            rows[leaf] = None
        return arrivals
    if arrivals.factors and not _torch.transforming() and hints.get(key, True):
        mode = KeepFactors(batch.size)
        before = random_state() if function.chunks.randomness != "error" else None
        try:
            _pull_back(function, batch, arrivals, mode)
            # Looking at every operation has its price; what it brings depends on shapes alone.
            hints[key] = arrivals.spared >= _WORTH * arrivals.numbers
            return arrivals
        except (RuntimeError, TypeError, ValueError) as error:
            # Code that wants a gradient's memory, not its numbers, can't have that of a product
            # which was not computed. Errors of other causes come again.
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
    """Runs the loss and pulls back, with ``vmap`` or, for one example alone, without."""
    alone = batch.alone
    # Plain autograd will do where nothing around the call could differentiate the result.
    recording = torch.is_grad_enabled() or _torch.dual_level() >= 0
    plain = alone and not recording and not torch.is_inference_mode_enabled()

    def example(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        level = None if alone else _torch.current_interpreter().level()

        def take(leaf: int, gradient: torch.Tensor) -> None:
            if alone:
                batch.call.carried.look_at([gradient])
            with mode.paused() if mode else nullcontext():
                whole = gradient if level is None else _rows(gradient, level, batch.size)
                rows = rows_of(_dense(whole).unsqueeze(0) if alone else whole)
                arrivals.gradient(leaf, rows)

        value, aux, pullback = _recorded(function, args, kwargs, batch.positions, plain)
        with mode.pulling_back() if mode else nullcontext():
            pullback.feed(torch.ones_like(value), take)
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
    """The loss of one example, auxiliary outputs, and the pullback; or these in plain autograd."""
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
    """The gradients of all examples, ``(c, *leaf.shape)``, from that which ``vmap`` maps."""
    if _torch.is_batched(gradient) and _torch.level_of(gradient) == level:
        value, dim = _torch.unwrap_batch(gradient, level)
        assert dim is not None
        return value.movedim(dim, 0) if dim else value
    return gradient.expand(size, *gradient.shape)  # no example is in it: the same for all


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that is sparse, or spread over processes, in one piece: its norm is wanted."""
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
        if function.chunks.budget is not None:
            raise ValueError(
                f"{function.api}: no size of chunks is chosen for compiled code; give chunk_size "
                "with compile, instead of budget"
            )
        self._compiler: Callable[..., Any] = jit(**({} if isinstance(options, bool) else options))
        self._function = function
        # The size of the chunks that are compiled, 0 for none, and their graph, by signatures.
        self._graphs: dict[Any, tuple[int, Callable[..., Any]]] = {}
        self._lock = threading.RLock()

    def run(self, batch: Batch) -> tuple[Any, list[Any], Any, list[Any]] | None:
        """Values, leaves and structure of aux, gradients by leaf; ``None`` if there is no graph."""
        if batch.size == 1:
            return None
        key, shapes = batch.signature(), len(self._graphs)
        if key not in self._graphs:
            if shapes == _SHAPES:
                self._warn(f"examples of more than {_SHAPES} shapes came; pad them")
            size = self._function.chunks.chunk_size or batch.size
            self._graphs[key] = size if shapes < _SHAPES else 0, self._graph_for(batch)
        size, graph = self._graphs[key]
        # Chunks of another size would have to be compiled too; and no graph is followed.
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
        """The gradients of chunks like one, and their values."""
        # (What `gradients` reads is part of a graph's signature: nothing that changes.)
        form = replace(batch, given=(), leaves=[], kwargs={})
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
        warn(f"{api}: compile=True has no effect here, chunks run in eager: {cause}")
