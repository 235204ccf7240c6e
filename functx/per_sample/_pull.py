"""Per-example gradients of a few examples, each handed over as soon as it is complete.

A gradient of one parameter is complete when all uses of the parameter have been pulled back. It is
given to a receiver there and then, and dropped: what the receiver does not keep never exists
together with the gradients of the other parameters. (A node on every *use*, as hooks on modules
are, would see parts of a gradient; the norm of a sum is no sum of norms.)

Several examples are mapped with ``vmap``. One example alone is not: it runs as it is, without the
limitations of ``vmap``, and if nobody could differentiate the result, in plain autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from functx import _torch, _tree, _validate
from functx._pullback import Pullback, record
from functx.per_sample import _random
from functx.per_sample._batch import Batch
from functx.per_sample._chunks import is_out_of_memory
from functx.per_sample._compiled import Compiled
from functx.per_sample._outer import KeepFactors
from functx.per_sample._sums import Rows

# Factors are looked for where they spare this much of all gradients' numbers.
_WORTH = 0.2


@dataclass(frozen=True)
class Loss:
    """What is differentiated, and how.

    Attributes:
        func: The loss of one example.
        positions: Of the differentiated arguments.
        has_aux: Whether it returns ``(value, aux)``.
        randomness: As for :func:`torch.func.vmap`.
        api: The name for error messages.
        hints: By signatures of batches: whether factors were worth looking for, and whether two
            passes are the better way; shared by calls.
        compiled: Runs it compiled, if that was asked for.
    """

    func: Callable[..., Any]
    positions: tuple[int, ...]
    has_aux: bool
    randomness: str
    api: str
    hints: dict[Any, bool] = field(default_factory=dict)
    compiled: Compiled | None = None

    def record(
        self, func: Callable[..., Any], args: Any, kwargs: Any, *, has_aux: bool, scalar: bool
    ) -> tuple[Any, Any, Pullback]:
        """As `functx._pullback.record`, of a function that returns losses."""
        check = functools.partial(_validate.check_scalar, api=self.api)
        return record(
            func,
            args,
            kwargs,
            self.positions,
            has_aux=has_aux,
            check_output=check if scalar else lambda output: None,
            api=self.api,
            once=True,
        )


class Receiver(Protocol):
    """Takes the gradients of one chunk of ``c`` examples."""

    factors: bool  # whether it can take factors

    def gradient(self, leaf: int, rows: Rows) -> None:
        """Take the gradients by one leaf, of shape ``(c, *leaf.shape)``."""


R = TypeVar("R", bound=Receiver)


def pull(loss: Loss, batch: Batch, make: Callable[[], R]) -> tuple[Any, Any, R]:
    """Runs the loss on each example, and feeds the gradients to a receiver.

    Returns:
        The values, of shape ``(c,)``, the auxiliary outputs (``None`` without ``has_aux``), leaves
        of shape ``(c, ...)``, and the receiver that took all gradients.
    """
    alone = batch.size == 1 and not _torch.transforming()
    run = _pull_one if alone else _pull_mapped
    serves = loss.compiled is not None and loss.compiled.serves(batch)
    key = (alone, batch.signature())
    receiver = make()
    if receiver.factors and not _torch.transforming() and loss.hints.get(key, True):
        mode = KeepFactors(batch.size)
        before = _random.state() if loss.randomness != "error" else None
        try:
            values, aux = run(loss, batch, receiver, mode)
            # Looking at every operation has its price; what it brings depends on shapes alone.
            loss.hints[key] = mode.spared >= _WORTH * mode.taken
            return values, aux, receiver
        except (RuntimeError, TypeError, ValueError) as error:
            # Code that wants a gradient's memory, not its numbers, can't have that of a product
            # which was not computed. Errors of other causes come again.
            if not mode.made or is_out_of_memory(error):
                raise
        loss.hints[key] = False
        receiver = make()
        if before is not None:
            _random.restore(before)
    elif serves:
        assert loss.compiled is not None
        found = loss.compiled.rows(loss, batch)
        if found is not None:
            values, aux, rows = found
            for leaf in range(len(rows)):
                receiver.gradient(leaf, rows[leaf])
                rows[leaf] = None
            return values, aux, receiver
    values, aux = run(loss, batch, receiver, None)
    return values, aux, receiver


def _pull_mapped(
    loss: Loss, batch: Batch, receiver: Receiver, mode: KeepFactors | None
) -> tuple[Any, Any]:
    """With ``vmap`` over the examples."""

    def example(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        level = _torch.current_interpreter().level()
        value, aux, pullback = loss.record(
            loss.func, args, kwargs, has_aux=loss.has_aux, scalar=True
        )
        _feed(pullback, value, receiver, mode, lambda found: _rows(found, level, batch.size))
        return value, (_tree.map_(_tensor, aux) if loss.has_aux else ())

    value, aux = batch.map(example, loss.randomness)
    return value, (aux if loss.has_aux else None)


def _pull_one(
    loss: Loss, batch: Batch, receiver: Receiver, mode: KeepFactors | None
) -> tuple[Any, Any]:
    """One example, as it is."""

    def recorded(*args: Any, **kwargs: Any) -> tuple[Any, Any, Pullback]:
        followed = torch.is_grad_enabled() or _torch.dual_level() >= 0
        if followed or torch.is_inference_mode_enabled():
            return loss.record(loss.func, args, kwargs, has_aux=loss.has_aux, scalar=True)
        return _record_plain(loss, args, kwargs)

    value, aux, pullback = batch.alone(recorded, loss.randomness)
    _feed(pullback, value, receiver, mode, lambda gradient: _whole(gradient).unsqueeze(0))
    value, aux = _tree.map_(
        lambda leaf: _tensor(leaf).unsqueeze(0), (value, aux if loss.has_aux else ())
    )
    return value, (aux if loss.has_aux else None)


def _record_plain(
    loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, Pullback]:
    """As `Loss.record`, in plain autograd: nothing around the call can differentiate the result."""
    _validate.check_inputs(args, loss.positions, loss.api)
    with torch.enable_grad():
        arguments = [
            _tree.map_(lambda leaf: leaf.detach().requires_grad_(), arg)
            if position in loss.positions
            else arg
            for position, arg in enumerate(args)
        ]
        output, aux = loss.func(*arguments, **kwargs), None
        if loss.has_aux:
            output, aux = _validate.split_aux(output, loss.api)
        _validate.check_scalar(output, loss.api)
    inputs = tuple(arguments[position] for position in loss.positions)
    pullback = Pullback(inputs, *_tree.flatten(output))
    aux = _tree.map_(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, aux)
    return output.detach(), aux, pullback


def _feed(
    pullback: Pullback,
    value: torch.Tensor,
    receiver: Receiver,
    mode: KeepFactors | None,
    rows: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def take(leaf: int, gradient: torch.Tensor) -> None:
        if mode is None:
            receiver.gradient(leaf, rows(gradient))
            return
        with mode.pause():
            receiver.gradient(leaf, mode.take(rows(gradient)))

    receivers = {leaf: functools.partial(take, leaf) for leaf in range(pullback.arity)}
    with mode.pulling_back() if mode else nullcontext():
        pullback.feed(torch.ones_like(value), receivers, retain_graph=False)


def _rows(gradient: torch.Tensor, level: int, size: int) -> torch.Tensor:
    """The gradients of all examples, ``(c, *leaf.shape)``, from that which ``vmap`` maps."""
    if _torch.is_batched(gradient) and _torch.level_of(gradient) == level:
        value, dim = _torch.unwrap_batch(gradient, level)
        assert dim is not None
        return value.movedim(dim, 0) if dim else value
    return gradient.expand(size, *gradient.shape)  # no example is in it: the same for all


def _whole(gradient: torch.Tensor) -> torch.Tensor:
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
