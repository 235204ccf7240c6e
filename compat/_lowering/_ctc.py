"""Connectionist temporal classification, which in torch reads lengths as numbers.

Here lengths may be traced: every target is as long as the longest could be, and what lies beyond a
length is masked.  The loss is an operation of its own, a scan in JAX, behind a custom Function.

torch's derivative in the log-probabilities is that of the loss after a ``log_softmax`` over them,
which is the same once it has gone back through one: ``exp(log_probs)`` more than the plain one.

Source:
    Graves et al., *Connectionist temporal classification*, ICML 2006.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from functx.compat._lowering._table import rule
from functx.compat._torch import CTC_LOSS, CTC_LOSS_BACKWARD

Lengths = Tensor | Sequence[int]
_REDUCTIONS = ("none", "mean", "sum")

_library = torch.library.Library("functx", "FRAGMENT")
_SAYS = (
    "Tensor log_probs, Tensor targets, Tensor ours, Tensor theirs, int blank, bool zero_infinity"
)
_library.define(f"ctc_loss({_SAYS}) -> Tensor")
_library.define(f"ctc_loss_backward(Tensor cotangent, {_SAYS}) -> Tensor")


def _in_torch(log_probs: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    return CTC_LOSS(log_probs, targets, *rest)[0].clone()


def _backward_in_torch(cotangent: Tensor, log_probs: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    *lengths, blank, zero_infinity = rest
    loss, alpha = CTC_LOSS(log_probs, targets, *lengths, blank)
    arguments = (cotangent, log_probs, targets, *lengths, loss, alpha, blank)
    return CTC_LOSS_BACKWARD(*arguments, zero_infinity)


_library.impl("ctc_loss", _in_torch, "CPU")
_library.impl("ctc_loss_backward", _backward_in_torch, "CPU")
torch.library.register_fake("functx::ctc_loss", lambda x, *_: x.new_empty(x.shape[1]), lib=_library)
torch.library.register_fake(
    "functx::ctc_loss_backward", lambda _, x, *__: torch.empty_like(x), lib=_library
)


class _Loss(torch.autograd.Function):
    """The loss of each example, of the arguments that the operator takes."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return torch.ops.functx.ctc_loss(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.rest = inputs[4:]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        gradient = _Pullback.apply(cotangent, *ctx.saved_tensors, *ctx.rest)
        return gradient, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size
        merged = [_merged(x, d, size, n) for n, x, d in zip((1, 0, 0, 0), args, in_dims)]
        return _Loss.apply(*merged, *args[4:]).unflatten(0, (size, -1)), 0


class _Pullback(torch.autograd.Function):
    """Its pullback, which torch can't differentiate."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return torch.ops.functx.ctc_loss_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        raise NotImplementedError("torch has no second derivative of ctc_loss")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size
        merged = [_merged(x, d, size, n) for n, x, d in zip((0, 1, 0, 0, 0), args, in_dims)]
        return _Pullback.apply(*merged, *args[5:]).unflatten(1, (size, -1)), 1


def _merged(x: Tensor, dim: int | None, size: int, at: int) -> Tensor:
    """A batch of batches as one, in that dimension."""
    x = x.unsqueeze(at) if dim is None else x.movedim(dim, at)
    return x.expand(*x.shape[:at], size, *x.shape[at + 1 :]).flatten(at, at + 1)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """``torch.nn.functional.ctc_loss``: the same arguments and results."""
    single = log_probs.ndim == 2
    if single:
        log_probs = log_probs.unsqueeze(1)
        targets = targets.reshape(1, -1)
    batch = log_probs.shape[1]
    ours = _lengths(input_lengths, batch, log_probs.device)
    theirs = _lengths(target_lengths, batch, log_probs.device)
    labels = _padded(targets, theirs, target_lengths)
    loss = _Loss.apply(log_probs, labels, ours, theirs, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == math.inf, 0.0, loss)
    kind = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    if kind == "mean":
        return (loss / theirs.clamp(min=1)).mean()
    if kind == "sum":
        return loss.sum()
    return loss.squeeze(0) if single else loss


def _lengths(lengths: Lengths, batch: int, device: torch.device) -> Tensor:
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths, device=device)
    return lengths.to(device, torch.int64).reshape(batch)


def _padded(targets: Tensor, lengths: Tensor, given: Lengths) -> Tensor:
    """Targets of shape ``(batch, longest)``; one behind the other, they are cut apart."""
    if targets.ndim == 2:
        return targets.to(torch.int64)
    # Of traced lengths nothing is known but their sum.
    longest = len(targets) if isinstance(given, Tensor) else max(given, default=0)
    starts = lengths.cumsum(0) - lengths
    places = starts[:, None] + torch.arange(longest, device=targets.device)
    if not len(targets):
        return torch.zeros_like(places)
    return targets.to(torch.int64)[places.clamp(max=len(targets) - 1)]


@rule("functx::ctc_loss")
def _loss(
    log_probs: Any, targets: Any, ours: Any, theirs: Any, blank: int, zero_infinity: bool = False
) -> Any:
    """By the forward recursion over the targets with blanks around each."""
    batch, longest = targets.shape
    labels = jnp.full((batch, 2 * longest + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    emitted = jnp.take_along_axis(log_probs, labels[None], 2)
    # Two labels may follow each other without the blank between them unless they are equal.
    skips = (labels[:, 2:] != blank) & (labels[:, 2:] != labels[:, :-2])
    skips = jnp.pad(skips, ((0, 0), (2, 0)))[:, : labels.shape[1]]
    place = jnp.arange(labels.shape[1])

    def shifted(x: Any, n: int) -> Any:
        padded = jnp.pad(x, ((0, 0), (n, 0)), constant_values=-jnp.inf)
        return padded[:, : labels.shape[1]]

    def step(alpha: Any, now: Any) -> Any:
        t, emission = now
        skipped = jnp.where(skips, shifted(alpha, 2), -jnp.inf)
        following = _log_sum(jnp.stack([alpha, shifted(alpha, 1), skipped])) + emission
        return jnp.where((t < ours)[:, None], following, alpha), None

    first = jnp.where(place < 2, emitted[0], -jnp.inf)
    alpha, _ = lax.scan(step, first, (jnp.arange(1, len(emitted)), emitted[1:]))
    last = 2 * theirs[:, None]
    ends = jnp.where((place == last) | (place == last - 1), alpha, -jnp.inf)
    # Without a step, only nothing can have been said.
    nothing = jnp.where(theirs > 0, -jnp.inf, 0.0).astype(alpha.dtype)
    return -jnp.where(ours > 0, _log_sum(ends.T), nothing)


def _log_sum(x: Any) -> Any:
    """``logsumexp`` over the first axis; where all is impossible, derivatives are zero."""
    most = lax.stop_gradient(x.max(0))
    possible = most > -jnp.inf
    most = jnp.where(possible, most, 0.0)
    total = jnp.where(possible, jnp.exp(x - most).sum(0), 1.0)
    return jnp.where(possible, jnp.log(total) + most, -jnp.inf)


@rule("functx::ctc_loss_backward")
def _loss_backward(g: Any, log_probs: Any, *rest: Any) -> Any:
    """As in torch, where what is impossible has no derivative unless it counts as nothing."""
    _, ours, *_, zero_infinity = rest
    loss, pull = jax.vjp(lambda x: _loss(x, *rest), log_probs)
    gradient = pull(g)[0] + jnp.exp(log_probs) * g[:, None]
    gradient = jnp.where(loss[:, None] < jnp.inf, gradient, 0.0 if zero_infinity else jnp.nan)
    return jnp.where(jnp.arange(len(log_probs))[:, None, None] < ours[:, None], gradient, 0.0)
