"""The first run of a region whose replays are compared by what operations give."""

from __future__ import annotations

from functx._remat._capture import FirstRun
from functx._remat._recording import Recording, Result
from functx._remat._region import Region


class RecordingRun(Recording, FirstRun):
    """A first run that also writes down what operations give."""

    _plain = False

    def __init__(self, region: Region, *, lift_constants: bool = False) -> None:
        super().__init__(region, lift_constants=lift_constants)
        self.start(region.options)

    def record(self, result: Result) -> None:
        """With the operation that gave it."""
        if self.entries:
            entry = self.entries[-1]
            entry.results = [*(entry.results or ()), result]
