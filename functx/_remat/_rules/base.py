"""What every rule has in common: a frame for one peeled-off level of a region."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor

from functx import _torch
from functx._remat._apart import hides_history
from functx._remat._levels import at_level
from functx._remat._region import Flat, Region


class Frame(ABC):
    """One transform level of a region: takes its tensors apart, and puts them together again.

    A frame is the function of the level below: called with values of that level, it enters a
    fresh level, wraps the values, runs ``fn`` (the function as this level sees it), leaves the
    level and returns unwrapped results. ``NOTE [levels]`` in `_region`.

    Attributes:
        inputs: the explicit inputs of this level, until the call has ended.
        fn: the function at this level: the frame of the next inner level, or the region's body.
        captured: tensors of this level that were captured during the first run.
        slots: how each input of this level is taken apart (and put together again).
        inside: the number of the level that `__call__` entered last.
        batch_size: of a batched level.
        duals: numbers of tensors that the first run made, had a tangent here, and are held.
        leaves: for each input, the id of the leaf of the throw-away tape that stands for it in the
            first run, where there is a tape.
    """

    batch_size: int | None = None
    duals: Set[int] = frozenset()

    def __init__(self, level: int, fn: Flat, region: Region) -> None:
        self.region = region
        self.fn = fn
        self.level = level
        self.inside = level
        self.inputs: Sequence[Tensor] = ()
        self.captured: list[Tensor] = []
        self.slots: list[Any] = []
        self.leaves: list[int] = []

    @abstractmethod
    def lower(self, t: Tensor) -> list[Tensor]:
        """Take one input of this level apart; records a slot."""

    @abstractmethod
    def lift(self, values: Sequence[Tensor], slot: Any, level: int) -> Tensor:
        """Put an input together inside the fresh level."""

    @abstractmethod
    def __call__(self, *values: Tensor) -> list[Tensor | None]:
        """Run at a fresh level."""

    @abstractmethod
    def finish(self, outs: list[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Results of the level below as results of this level; attaches a node if it must."""

    def levels_inside(self) -> Sequence[Any]:
        """The frames of the levels inside of this one, outermost first."""
        frames = self.region.frames
        return frames[frames.index(self) + 1 :]

    def kind(self) -> Any:
        """What tells levels apart that do the same to all tensors that they are given."""
        return type(self), self.level

    def differentiates(self) -> bool:
        """Whether an input has a tape at this level."""
        return False

    def inside_of(self, t: Tensor) -> Tensor | None:
        """The value of the level below in what was a tensor of this one, which has ended."""
        return None

    def leave(self, t: Tensor) -> Tensor:
        """The same, as a further result. ``NOTE [leaving]`` in `_leaving`."""
        value = self.inside_of(t)
        assert value is not None
        return value

    def holds_duals(self) -> bool:
        """Whether inputs are duals of the user's own ``dual_level``."""
        return False

    def reached(self) -> list[bool]:
        """Whether some result depends on an input, of those that require grad at this level."""
        region = self.region
        if hides_history(region):
            return [True] * len(self.leaves)
        reached = [*map(region.reached.__contains__, self.leaves)]
        return reached if True in reached else [True] * len(reached)

    def cut(self, t: Tensor) -> Tensor:
        """``t`` off the tape of this level."""
        raise NotImplementedError

    def transparent(self) -> bool:
        """Whether an operation at this level is the same one at the level below."""
        return False

    def dual(self) -> bool:
        """Whether this is a level of forward mode; then a true slot is an input with a tangent."""
        return False

    def needed(self) -> list[bool]:
        """Which inputs of this level, captures included, must be kept for a pullback.

        Those that it reads; and those with a tangent of a level outside of this one, because what
        runs in a replay depends on who has a tangent.
        """
        frames = self.region.frames
        read = [*self.region.needed] if frames[-1] is self else self._read()
        if frames[0] is self:
            return read
        outside = frames[: frames.index(self)]
        if not any(frame.dual() for frame in outside):
            return read
        owners = [i for i, slot in enumerate(self.slots) for _ in range(self.width(slot))]
        for frame in reversed(outside):
            for owner, slot in zip(owners, frame.slots):
                if slot and frame.dual():
                    read[owner] = True
            owners = [o for o, slot in zip(owners, frame.slots) for _ in range(frame.width(slot))]
        return read

    def _read(self) -> list[bool]:
        flags = list(self.region.needed)
        for frame in reversed(self.region.frames):
            if frame is self:
                break
            flags = [f for f, slot in zip(flags, frame.slots) for _ in range(frame.width(slot))]
        return flags

    def wanted_above(self, wanted: Sequence[int]) -> list[int]:
        """The results of this level that some results of the level below belong to."""
        return list(wanted)

    def width(self, slot: Any) -> int:
        """How many values of the level below an input becomes."""
        return 1

    def capture(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Late inputs of this level, as values of the level below."""
        self.captured += tensors
        with at_level(self.level):
            return self.lower_all(tensors)

    def lower_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Inputs as values of the level below; a wrapper of a level that ended is its value."""
        return _torch.unwrap_dead([value for t in tensors for value in self.lower(t)])

    def admit(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Put the inputs that were captured last together, while the level is entered.

        Called with the values that `capture` made (of all inputs captured in one go), after the
        level below admitted them.
        """
        first, rest = len(self.slots), len(values)
        while rest > 0:
            first -= 1
            rest -= self.width(self.slots[first])
        with at_level(self.inside):
            return self.lift_all(values, self.slots[first:], self.inside)

    def lift_all(self, values: Sequence[Tensor], slots: Sequence[Any], level: int) -> list[Tensor]:
        """Put inputs together, each from as many values as its slot says."""
        if len(values) == len(slots):
            return [self.lift((v,), slot, level) for v, slot in zip(values, slots)]
        lifted, at = [], 0
        for slot in slots:
            n = self.width(slot)
            lifted.append(self.lift(values[at : at + n], slot, level))
            at += n
        return lifted
