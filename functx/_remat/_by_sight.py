"""Regions whose replays run other operations than the forward: a loop of unknown length.

Such a loop keeps its first state only. While it runs forward, each step forgets the tape of the
one before; when it has ended its length is known, and replays run it as the tree of regions that
is best for that length. Position by position they can't be compared with the forward. What stays
the same is the order in which foreign tensors are *first met*, as the steps come in order; so
that is what a replay hands them out by, and it raises where a tensor does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Generator, Tensor

from functx import _torch, _tree
from functx._errors import ReplayError
from functx._remat._capture import FirstRun
from functx._remat._entry import MADE_HERE
from functx._remat._hung_on_given import LEFT, hung_already
from functx._remat._levels import at_level
from functx._remat._region import Region
from functx._remat._replay import by_sight_replay
from functx._remat._tapes import tracked
from functx._remat._tracker import SILENT, active_tracker, tracking
from functx._remat._watch import watching
from functx._torch_edges import requires_grad_anywhere


@by_sight_replay
class BySight(FirstRun):
    """The tracker of such a replay.

    Args:
        region: what runs again.
        externals: what the forward met, explicit inputs first, as this replay has it.
        explicit: how many of them are explicit inputs.
    """

    _plain = False

    def __init__(self, region: Region, externals: Sequence[Tensor], explicit: int) -> None:
        super().__init__(region)
        self._externals = externals
        self._met = 0
        self.left: dict[int, Any] = {}
        self.leaves = {id(t): t for t in externals}
        self._depth = _torch.interpreter_depth()
        for i, t in enumerate(externals[:explicit]):
            self._register("input", i, t, t)
            given = region.given[i]()
            if given is not None:  # as the body may close over it
                self._index[id(given)] = (given, t, i)
        self._met = explicit

    def close(self, func: Any) -> None:
        """Nothing is recorded."""
        self._sources.clear()
        self._scalars.clear()

    def hang(self, func: Any, t: Tensor, hook: Any) -> Any:
        """Only on what it makes: the first run has hung the others."""
        return LEFT if self._outside(t) is None else hung_already()

    def made(self, t: Tensor) -> None:
        """Remember that it was made."""
        self.remember(t)

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """What is written to is a copy already."""

    def written(self, tensors: Sequence[Tensor]) -> None:
        """What is written to is a copy already."""

    def drawn_from(self, generator: Generator) -> None:
        """The generators were put back already."""

    def complete(self) -> None:
        """The body returned: everything that the forward met must have been met."""
        if self._met < len(self._externals):
            self._depart(f"{len(self._externals) - self._met} tensors that it read are not read")

    def _meet_foreign(self, t: Tensor, in_engine: bool) -> Tensor:
        """The next of the tensors that the forward met."""
        if in_engine and not requires_grad_anywhere(t):
            self._sources.append(MADE_HERE)
            return t
        if tracked(t) and self._made_here(t, in_engine):
            self.remember(t)
            self._sources.append(MADE_HERE)
            return t
        if self._met == len(self._externals):
            self._depart(f"it reads a further tensor, of shape {tuple(t.shape)}")
        standin = self._externals[self._met]
        if (t.shape, t.dtype) != (standin.shape, standin.dtype):
            self._depart(
                f"it reads a {t.dtype} tensor of shape {tuple(t.shape)} where the forward read a "
                f"{standin.dtype} tensor of shape {tuple(standin.shape)}"
            )
        self._met += 1
        self._sources.append(self._register("met", self._met, t, standin))
        return standin

    def _depart(self, how: str) -> NoReturn:
        raise ReplayError(
            f"remat: the replay of {self._region.options.name!r} departed from its forward: {how}. "
            "A step must do the same each time it runs, so something it reads changed between "
            "forward and backward. Keep it in the loop's state, or keep it as it is until the "
            "backward has run."
        )


def replaying() -> bool:
    """Whether the region that is running in this context replays by sight."""
    return type(active_tracker()) is BySight


def forget(tree: Any) -> Any:
    """A pytree without history, at every level: values as leaves of the throw-away tapes.

    Only for a region that replays by sight, which keeps no record that could depend on the history.
    """
    tracker = active_tracker()
    if not isinstance(tracker, FirstRun):
        return tree
    before = set(tracker.leaves)
    with tracking(SILENT), watching(False):
        tree = _tree.map_(lambda t: _leaf(t, tracker), tree)
    for key in tracker._forgotten:  # what the step before was given
        del tracker.leaves[key]
    tracker._forgotten = [key for key in tracker.leaves if key not in before]
    return tree


def _leaf(t: Any, tracker: FirstRun) -> Any:
    if not isinstance(t, Tensor) or not tracked(t):
        return t
    frames = tracker._region.frames
    slots = [len(frame.slots) for frame in frames]
    values = [t]
    try:
        for frame in reversed(frames):
            with at_level(frame.inside):
                values = frame.lower_all(values)
        for frame, n in zip(frames, slots):
            with at_level(frame.inside):
                values = frame.lift_all(values, frame.slots[n:], frame.inside)
                if frame.level == 0:
                    # A result of a region is no leaf, and the body may hand this on as it is.
                    values = [v.view_as(v) for v in values]
    finally:
        for frame, n in zip(frames, slots):
            del frame.slots[n:]
    (value,) = values
    tracker.remember(value)
    return value
