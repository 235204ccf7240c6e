"""A replay that is not compared."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from functx._remat._tracker import Tracker

Met = tuple[Sequence[Tensor], Sequence[tuple[int, weakref.ref[Tensor]]]]
"""What a first run captured, and its inputs by number: whoever closes over one holds it."""


def met_as(originals: Iterable[Tensor], origins: Iterable[tuple[str, int]]) -> Met:
    """What a first run has met, by the kind and number of each."""
    those = [*zip(originals, origins)]
    given = [(n, weakref.ref(t)) for t, (kind, n) in those if kind == "input"]
    return [t for t, (kind, _) in those if kind == "capture"], given


class Lenient(Tracker):
    """The tracker of a replay that is not compared: externals are known by identity.

    For pullbacks, whose operations are the engine's choice and may differ from run to run (what
    torch sets up at first use runs once); only what hooks and custom Functions close over is
    foreign there. That may be an input, too: what the pullback reads, they may read.

    Args:
        met: by the first run.
        captured: what stands for what it captured now.
        inputs: what stands for its inputs.
    """

    def __init__(self, met: Met, captured: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.left: dict[int, Tensor] = {}
        given = [(o, inputs[n]) for n, ref in met[1] if (o := ref()) is not None]
        pairs = [*given, *zip(met[0], captured, strict=True)]
        self._standins = {id(o): (o, s) for o, s in pairs}

    def resolve(self, t: Tensor) -> Tensor:
        """The stand-in of a captured tensor or an input, anything else as it is."""
        found = self._standins.get(id(t))
        return t if found is None else found[1]

    def close(self, func: Any) -> None:
        """Nothing is compared."""
        self._scalars.clear()

    def made(self, t: Tensor) -> None:
        """Nothing is kept."""

    def complete(self) -> None:
        """Nothing is compared."""
