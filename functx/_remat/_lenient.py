"""A replay that is not compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functx._remat._tracker import Tracker


class Lenient(Tracker):
    """The tracker of a replay that is not compared: externals are known by identity.

    For pullbacks, whose operations are the engine's choice and may differ from run to run (what
    torch sets up at first use runs once); only what hooks close over is foreign there.

    Args:
        region: what is replayed.
        late: what stands for what it captured now.
    """

    def __init__(self, region: Any, late: Sequence[Tensor]) -> None:
        super().__init__()
        self.left: dict[int, Tensor] = {}
        captured, constants = region.originals
        found = (constant.for_replay(region.options.name) for constant in region.constants)
        pairs = zip([*captured, *constants], [*late, *found], strict=True)
        self._standins = {id(o): (o, s) for o, s in pairs}

    def resolve(self, t: Tensor) -> Tensor:
        """The stand-in of a captured tensor, anything else as it is."""
        found = self._standins.get(id(t))
        return t if found is None else found[1]

    def close(self, func: Any) -> None:
        """Nothing is compared."""
        self._scalars.clear()

    def made(self, t: Tensor) -> None:
        """Nothing is kept."""

    def complete(self) -> None:
        """Nothing is compared."""
