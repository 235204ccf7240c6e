"""What the caller asked of a region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """What the caller asked of a region.

    Attributes:
        name: of the function, for messages.
        policy: what to keep beside the inputs.
        preserve_rng_state: whether replays draw the random numbers of the forward; ``"all"`` for
            Python's and numpy's too, wherever they are drawn.
        determinism_check: how replays are compared with the forward.
        prune: whether replays leave out what the pullback does not read.
        replay: whether this is the pullback of another region.
    """

    name: str = "region"
    policy: Any = None
    preserve_rng_state: bool | str = True
    determinism_check: str = "default"
    prune: bool = True
    replay: bool = False
