"""The errors functx raises: each names what was called, the cause, and the way out."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError


class RematError(CheckpointError):
    """A region can't keep the promise that ``remat(f)`` is ``f``.

    Subclasses :class:`torch.utils.checkpoint.CheckpointError` (a ``RuntimeError``), so that code
    which guards against torch's checkpoint guards against functx too.
    """


def not_initialized(name: str) -> RematError:
    """The error for a lazy module, whose parameters are made by its first call."""
    return RematError(
        f"remat: {name!r} has a lazy module that was not initialized, and its first call, which "
        "initializes it, can't be replayed. Call it once outside of regions and transforms before, "
        "with a batch of the right shape."
    )


class ReplayError(RematError):
    """A replay departed from what ran forward."""


class TracingError(RuntimeError):
    """A function can't be traced into a graph: it reads values of tensors in Python, say."""


class LoweringError(NotImplementedError):
    """A torch program can't be expressed in JAX; the message lists every reason found."""
