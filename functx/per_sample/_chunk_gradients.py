"""Per-example gradients of a few examples, each handed over as soon as it is complete.

A gradient of one parameter is complete when all uses of the parameter have been pulled back. It is
handed to `Arrivals` there and then: what these do not keep never exists together with the gradients
of the other parameters. (A node on every *use*, as hooks on modules are, would see parts of a
gradient; the norm of a sum is no sum of norms.)

Several examples are mapped with ``vmap``. One example alone runs as it is, and if nothing could
differentiate the result, in plain autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from functx import _torch, _tree, _validate
from functx._reverse_mode import Pullback, record
from functx.per_sample._batch import Batch, random_state, restore_random_state
from functx.per_sample._batched_function import BatchedFunction
from functx.per_sample._chunks import is_out_of_memory
from functx.per_sample._outer_products import KeepFactors, rows_of
from functx.per_sample._sums import Factored, Rows, squared_norms

# Factors are looked for where they spare this much of all gradients' numbers.
_WORTH = 0.2


@dataclass
class Arrivals:
    """The gradients of one chunk as they arrive: squared norms by group, and what is kept.

    Attributes:
        groups: For each leaf the number of its group; ``None`` where no norms are taken.
        dtype: The dtype of squared norms.
        keeps: Gradients of these types are kept.
        values: The losses, of shape ``(c,)``.
        aux: The auxiliary outputs, leaves of shape ``(c, ...)``; ``None`` without ``has_aux``.
    """

    groups: list[int] | None
    dtype: torch.dtype
    keeps: tuple[type, ...]
    values: Any = field(init=False)
    aux: Any = field(init=False)
    squares: dict[int, torch.Tensor] = field(init=False, default_factory=dict)  # by group
    kept: dict[int, Rows] = field(init=False, default_factory=dict)  # by leaf
    dropped: list[int] = field(init=False, default_factory=list)  # leaves
    _numbers: int = field(init=False, default=0)  # of gradients
    _spared: int = field(init=False, default=0)  # of gradients known by their factors

    def gradient(self, leaf: int, rows: Rows) -> None:
        """Take the gradients by one leaf, of shape ``(c, *leaf.shape)``."""
        if self.groups is not None:
            group, square = self.groups[leaf], squared_norms(rows, self.dtype)
            self.squares[group] = self.squares[group] + square if group in self.squares else square
        self._numbers += rows.shape.numel()
        self._spared += rows.shape.numel() * isinstance(rows, Factored)
        if isinstance(rows, self.keeps):
            self.kept[leaf] = rows
        else:
            self.dropped.append(leaf)

    @property
    def factors(self) -> bool:
        """Whether gradients may be known by factors."""
        return self.keeps != (torch.Tensor,)

    def worth_factors(self) -> bool:
        """Whether enough gradients were known by factors."""
        return self._spared >= _WORTH * self._numbers


def chunk_gradients(function: BatchedFunction, batch: Batch, arrivals: Arrivals) -> Arrivals:
    """Runs the loss on each example, and hands over the gradients to new ``arrivals``."""
    key, hints = ("factors", batch.alone, batch.signature()), function.hints
    if arrivals.factors and not _torch.transforming() and hints.get(key, True):
        mode = KeepFactors(batch.size)
        before = random_state() if function.randomness != "error" else None
        try:
            _pull_back(function, batch, arrivals, mode)
            # Looking at every operation has its price; what it brings depends on shapes alone.
            hints[key] = arrivals.worth_factors()
            return arrivals
        except (RuntimeError, TypeError, ValueError) as error:
            # Code that wants a gradient's memory, not its numbers, can't have that of a product
            # which was not computed. Errors of other causes come again.
            if not mode.made or is_out_of_memory(error):
                raise
        hints[key] = False
        arrivals = replace(arrivals)
        if before is not None:
            restore_random_state(before)
    elif function.compiled is not None and (found := function.compiled.run(batch)) is not None:
        arrivals.values, arrivals.aux, rows = found
        for leaf in range(len(rows)):
            arrivals.gradient(leaf, rows[leaf])
            rows[leaf] = None
        return arrivals
    _pull_back(function, batch, arrivals, None)
    return arrivals


def recorded(
    function: BatchedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: tuple[int, ...],
    losses: Callable[..., Any] | None = None,
) -> tuple[Any, Any, Pullback]:
    """The loss of one example, auxiliary outputs, and the pullback; or ``losses`` of several."""
    check = functools.partial(_validate.check_scalar, api=function.api)
    options: dict[str, Any] = {"has_aux": function.has_aux, "check_output": check}
    if losses is not None:
        options = {"has_aux": False, "check_output": lambda output: None}
    func, api = losses or function.func, function.api
    return record(func, args, kwargs, positions, api=api, once=True, **options)


def _pull_back(
    function: BatchedFunction, batch: Batch, arrivals: Arrivals, mode: KeepFactors | None
) -> None:
    """Runs the loss and pulls back, with ``vmap`` or, for one example alone, without."""
    alone = batch.alone
    followed = torch.is_grad_enabled() or _torch.dual_level() >= 0
    plain = alone and not followed and not torch.is_inference_mode_enabled()

    def example(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        level = None if alone else _torch.current_interpreter().level()

        def take(leaf: int, gradient: torch.Tensor) -> None:
            with mode.paused() if mode else nullcontext():
                whole = gradient if level is None else _rows(gradient, level, batch.size)
                rows = rows_of(_dense(whole).unsqueeze(0) if alone else whole)
                arrivals.gradient(leaf, rows)

        record_loss = _recorded_plain if plain else recorded
        value, aux, pullback = record_loss(function, args, kwargs, batch.positions)
        with mode.pulling_back() if mode else nullcontext():
            pullback.feed(torch.ones_like(value), take)
        return value, (_tree.map_(_tensor, aux) if function.has_aux else ())

    arrivals.values, aux = batch.map(example, function.randomness)
    arrivals.aux = aux if function.has_aux else None


def _recorded_plain(
    function: BatchedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: tuple[int, ...],
) -> tuple[Any, Any, Pullback]:
    """As `recorded`, in plain autograd: nothing around the call can differentiate the result."""
    _validate.check_inputs(args, positions, function.api)
    with torch.enable_grad():
        arguments = [
            _tree.map_(lambda leaf: leaf.detach().requires_grad_(), arg) if at in positions else arg
            for at, arg in enumerate(args)
        ]
        output, aux = function.func(*arguments, **kwargs), None
        if function.has_aux:
            output, aux = _validate.split_aux(output, function.api)
        _validate.check_scalar(output, function.api)
    pullback = Pullback(tuple(arguments[at] for at in positions), *_tree.flatten(output))
    aux = _tree.map_(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, aux)
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
            f"per_sample: expected aux to consist of tensors, got {_validate.describe(leaf)} of "
            f"type {type(leaf).__name__}"
        )
    return leaf
