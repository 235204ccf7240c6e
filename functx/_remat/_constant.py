"""What a body reads that no derivative flows to: a replay must find what the forward found."""

from __future__ import annotations

from torch import Tensor

from functx import _torch
from functx._errors import RematError, ReplayError


class Constant:
    """A tensor the body read that no derivative flows to.

    If the body writes to it (a running mean, a step counter), a replay must start from what the
    forward found and must not write again: it gets a copy of the value from before.
    """

    __slots__ = ("before", "value", "version")

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.version = _torch.version(value)
        self.before: Tensor | None = None

    def about_to_be_written(self) -> None:
        """Keep the value that a replay must start from."""
        if self.before is None:
            with _torch.cleared_interpreter_stack():
                self.before = self.value.detach().clone()

    def seal(self, name: str) -> None:
        """The first run ended: a write nobody announced can't be undone for a replay."""
        if self.before is not None:
            self.value = self.before
        elif _torch.version(self.value) != self.version:
            raise RematError(
                f"remat: the region {name!r} wrote to a tensor of shape {tuple(self.value.shape)} "
                "that it did not make, in a way functx can't see beforehand, so a replay could "
                "not start from the same value. Write to it outside of the region."
            )

    def for_replay(self, name: str) -> Tensor:
        """The value that the forward found."""
        if self.before is not None:
            with _torch.cleared_interpreter_stack():
                return self.before.clone()
        if _torch.version(self.value) != self.version:
            raise ReplayError(
                f"remat: a tensor of shape {tuple(self.value.shape)} that the region {name!r} "
                "reads was modified in place between its forward and its replay. Modify it after "
                "the backward, or pass a clone."
            )
        return self.value
