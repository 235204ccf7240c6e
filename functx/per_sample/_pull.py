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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from functx import _torch, _tree, _validate
from functx._pullback import Pullback, record
from functx._vmap import vmap_by_keys as vmap
from functx.per_sample import _random
from functx.per_sample._batch import Batch
from functx.per_sample._compiled import Compiled
from functx.per_sample._factors import Factored
from functx.per_sample._failure import is_out_of_memory
from functx.per_sample._outer import KeepFactors, Outer

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
        hints: For signatures of batches, whether factors were worth looking for; shared by calls.
        compiled: Runs it compiled, if that was asked for.
    """

    func: Callable[..., Any]
    positions: tuple[int, ...]
    has_aux: bool
    randomness: str
    api: str
    hints: dict[Any, bool] = field(default_factory=dict)
    compiled: Compiled | None = None


class Receiver(Protocol):
    """Who takes the gradients of one chunk of ``c`` examples."""

    factors: bool  # whether it can take factors
    committing: bool  # whether what it took can't be taken again

    def restart(self) -> None:
        """Forget what was taken: it comes again."""

    keeps: bool  # whether it keeps all gradients, so that they may as well come at the end

    def gradient(self, leaf: int, rows: torch.Tensor | Factored) -> None:
        """Take the gradients by one leaf, of shape ``(c, *leaf.shape)``."""

    def again(self) -> Sequence[int]:
        """Leaves whose gradients are wanted a second time, once all have been seen."""

    def may_ask_again(self) -> bool:
        """Whether `again` can name any leaf."""


def pull(loss: Loss, batch: Batch, receiver: Receiver) -> tuple[Any, Any]:
    """Runs the loss on each example, and feeds the gradients to ``receiver``.

    Returns:
        The values, of shape ``(c,)``, and the auxiliary outputs (``None`` without ``has_aux``),
        leaves of shape ``(c, ...)``.
    """
    run = _pull_one if batch.size == 1 and not _torch.transforming() else _pull_mapped
    serves = loss.compiled is not None and loss.compiled.serves(batch)
    key = (batch.size == 1, batch.signature())
    if not receiver.factors or _torch.transforming() or not loss.hints.get(key, True):
        found = _pull_compiled(loss, batch, receiver) if serves else None
        return run(loss, batch, receiver, None) if found is None else found
    mode = KeepFactors(batch.size)
    before = _random.state() if loss.randomness != "error" else None
    try:
        result = run(loss, batch, receiver, mode)
        # Looking at every operation has its price; what it brings depends on shapes alone.
        loss.hints[key] = mode.spared >= _WORTH * mode.taken
        return result
    except (RuntimeError, TypeError, ValueError) as error:
        # Code that wants a gradient's memory, not its numbers, can't have that of a product which
        # was not computed. Errors of other causes come again.
        if not mode.made or receiver.committing or is_out_of_memory(error):
            raise
    loss.hints[key] = False
    receiver.restart()
    if before is not None:
        _random.restore(before)
    return run(loss, batch, receiver, None)


def _pull_compiled(loss: Loss, batch: Batch, receiver: Receiver) -> tuple[Any, Any] | None:
    """As `pull`, compiled; ``None`` where that can't be, and nothing was fed."""
    assert loss.compiled is not None
    found = loss.compiled.rows(loss, batch)
    if found is None:
        return None
    value, aux, rows = found
    for leaf in range(len(rows)):
        receiver.gradient(leaf, rows[leaf])
        if not receiver.may_ask_again():
            rows[leaf] = None
    for leaf in receiver.again():
        receiver.gradient(leaf, rows[leaf])
    return value, aux


def _pull_mapped(
    loss: Loss, batch: Batch, receiver: Receiver, mode: KeepFactors | None
) -> tuple[Any, Any]:
    """As `pull`, with ``vmap`` over the examples."""
    mapped = [number for number, dim in enumerate(batch.dims) if dim is not None]

    def example(*rows: torch.Tensor) -> tuple[Any, Any]:
        level = _torch.current_interpreter().level()
        leaves = list(batch.leaves)
        for number, row in zip(mapped, rows):
            leaves[number] = row
        args = _tree.unflatten(batch.spec, leaves)
        value, aux, pullback = _record(loss, args, batch.kwargs)
        _feed(pullback, value, receiver, mode, lambda found: _rows(found, level, batch.size))
        return value, (_tree.map_(_tensor, aux) if loss.has_aux else ())

    value, aux = vmap(
        example, in_dims=tuple(batch.dims[number] for number in mapped), randomness=loss.randomness
    )(*(batch.leaves[number] for number in mapped))
    return value, (aux if loss.has_aux else None)


def _pull_one(
    loss: Loss, batch: Batch, receiver: Receiver, mode: KeepFactors | None
) -> tuple[Any, Any]:
    """As `pull`, for one example, as it is."""
    args = batch.one(0)
    with _random.allowed(loss.randomness, first=batch.start == 0):
        followed = torch.is_grad_enabled() or _torch.dual_level() >= 0
        if followed or torch.is_inference_mode_enabled():
            value, aux, pullback = _record(loss, args, batch.kwargs)
        else:
            value, aux, pullback = _record_plain(loss, args, batch.kwargs)
    _feed(pullback, value, receiver, mode, lambda gradient: _whole(gradient).unsqueeze(0))
    value, aux = _tree.map_(_stacked, (value, aux if loss.has_aux else ()))
    return value, (aux if loss.has_aux else None)


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that is sparse, or spread over processes, in one piece: its norm is wanted."""
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _stacked(leaf: Any) -> torch.Tensor:
    return _tensor(leaf).unsqueeze(0)


def _tensor(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise ValueError(
            f"per_sample: expected aux to consist of tensors, got {_validate.describe(leaf)} of "
            f"type {type(leaf).__name__}"
        )
    return leaf


def _record(loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Pullback]:
    return record(
        loss.func,
        args,
        kwargs,
        loss.positions,
        has_aux=loss.has_aux,
        check_output=functools.partial(_validate.check_scalar, api=loss.api),
        api=loss.api,
        once=True,
    )


def _record_plain(
    loss: Loss, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, Pullback]:
    """As `record`, in plain autograd: nothing around the call can differentiate the result."""
    _validate.check_inputs(args, loss.positions, loss.api)

    def leaf_of(leaf: Any) -> Any:
        return leaf.detach().requires_grad_()

    with torch.enable_grad():
        arguments = [
            _tree.map_(leaf_of, arg) if position in loss.positions else arg
            for position, arg in enumerate(args)
        ]
        output, aux = loss.func(*arguments, **kwargs), None
        if loss.has_aux:
            output, aux = _validate.split_aux(output, loss.api)
        _validate.check_scalar(output, loss.api)
    inputs = tuple(arguments[position] for position in loss.positions)
    pullback = Pullback(inputs, *_tree.flatten(output))
    return output.detach(), _tree.map_(_detached, aux), pullback


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


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
        mode.paused = True
        try:
            found = _factored(rows(gradient))
            mode.taken += gradient.numel()
            mode.spared += gradient.numel() * isinstance(found, Factored)
            receiver.gradient(leaf, found)
        finally:
            mode.paused = False

    def feed(leaves: Sequence[int], retain_graph: bool) -> None:
        receivers = {leaf: functools.partial(take, leaf) for leaf in leaves}
        with mode.pulling_back() if mode else nullcontext():
            pullback.feed(one, receivers, retain_graph)

    one = torch.ones_like(value)
    if receiver.keeps:
        with mode.pulling_back() if mode else nullcontext():
            gradients = _tree.leaves(pullback(one, retain_graph=False))
            for leaf, gradient in enumerate(gradients):
                take(leaf, gradient)
        return
    feed(range(pullback.arity), retain_graph=receiver.may_ask_again())
    wanted = receiver.again()
    if wanted:
        feed(wanted, retain_graph=False)


def _factored(rows: torch.Tensor) -> torch.Tensor | Factored:
    """The factors of rows that are products not computed."""
    if not isinstance(rows, Outer):
        return rows
    terms = rows.terms()
    if terms is None or rows.sizes()[0] != len(rows):
        return rows.dense()
    return Factored(terms, rows.shape[1:])


def _rows(gradient: torch.Tensor, level: int, size: int) -> torch.Tensor:
    """The gradients of all examples, ``(c, *leaf.shape)``, from that which ``vmap`` maps."""
    if _torch.is_batched(gradient) and _torch.level_of(gradient) == level:
        value, dim = _torch.unwrap_batch(gradient, level)
        assert dim is not None
        return value.movedim(dim, 0) if dim else value
    return gradient.expand(size, *gradient.shape)  # no example is in it: the same for all
