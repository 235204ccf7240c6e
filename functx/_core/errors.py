"""The errors functx raises: each names what was called, the cause, and the way out."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError


class RematError(CheckpointError):
    """A region can't keep the promise that ``remat(f)`` is ``f``.

    Subclasses :class:`torch.utils.checkpoint.CheckpointError` (a ``RuntimeError``), so that code
    which guards against torch's checkpoint guards against functx too.
    """


class ReplayError(RematError):
    """A replay departed from what ran forward."""


class TracingError(RuntimeError):
    """A function can't be traced into a graph: it reads values of tensors in Python, say."""


class LoweringError(NotImplementedError):
    """A torch program can't be expressed in JAX; the message lists every reason found."""
