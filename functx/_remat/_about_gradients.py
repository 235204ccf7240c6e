"""Tensors that a body did not make, or that leave it: what it asks of their gradients by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from functx._remat._gradients import RETAIN_GRAD, refuse_if_lost
from functx._remat._region import Region
from functx._remat._tracker import SILENT, Tracker, tracking


class AboutGradients(Tracker):
    """The part of the tracker of a first run that `_gradients` is about."""

    _region: Region
    _index: dict[int, tuple[Tensor, Tensor, int]]
    _originals: list[Tensor]
    # Whose gradients are to be retained: what is to ask for them, weakly or not.
    _retained: Sequence[Callable[[], Tensor | None]] = ()

    def knows(self, t: Tensor) -> bool:
        """Whether ``t`` was seen being made in this run."""
        raise NotImplementedError

    def given(self) -> Sequence[Tensor]:
        """What the body was given, or has captured so far."""
        return self._originals

    def about_gradients(self, func: Any, args: Any) -> bool:
        """Ask the tensor that a stand-in stands for, or raise."""
        t = args[0]
        found = self._index.get(id(t))
        if func == RETAIN_GRAD:
            original = None if found is None else self._originals[found[2]]
            ask = weakref.ref(t) if original is None else lambda: original
            self._retained = [*self._retained, ask]
            return True
        if found is not None or not self.knows(t):
            region, tracker = self._region, self
            while found is not None:  # as the regions around this one know it
                t, tracker = tracker._originals[found[2]], tracker._region.outer
                found = tracker._index.get(id(t)) if isinstance(tracker, AboutGradients) else None
            with tracking(SILENT):
                refuse_if_lost(func, t, args, region.options.name)
        return False

    def retained(self, outs: Sequence[Tensor | None]) -> list[int | Callable[[], Tensor | None]]:
        """Whose gradients are to be retained: results, by position, and what is held otherwise."""
        if not self._retained:
            return []
        those = {id(t): i for i, t in enumerate(outs) if t is not None}
        return [those.get(id(ref()), ref) for ref in self._retained]
