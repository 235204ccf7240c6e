"""The errors that functx raises. Each message names the call, the cause, and what to do instead."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError


class RematError(CheckpointError):
    """A region can't keep the promise that ``remat(f)`` is ``f``.

    It derives from :class:`torch.utils.checkpoint.CheckpointError` (a ``RuntimeError``), so code
    that catches the errors of torch's checkpoint catches functx's errors too.
    """


class ReplayError(RematError):
    """A replay did not run the same operations as the forward pass."""


class TracingError(RuntimeError):
    """A function can't be traced into a graph, for example since Python reads a tensor's value."""


class LoweringError(NotImplementedError):
    """A torch program can't be expressed in JAX; the message lists all reasons that were found."""
