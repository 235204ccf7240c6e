"""What the caller asked of a region."""

from __future__ import annotations

import functools
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
        debug: whether both sequences of operations are shown where a replay departs.
        by_sight: whether replays may run other operations than the forward, see `_by_sight`.
        contexts: the policy as ``torch.compile`` takes it; ``None`` if there is none it can take.
        budget: bytes, a share of what the pullback needs without regions, or a plan.
        replay: whether this is the pullback of another region.
    """

    name: str = "region"
    policy: Any = None
    preserve_rng_state: bool | str = True
    determinism_check: str = "default"
    prune: bool = True
    debug: bool = False
    by_sight: bool = False
    contexts: Any = None
    replay: bool = False
    budget: Any = None

    @functools.cached_property
    def values(self) -> bool:
        """Whether what operations give is compared, bit by bit."""
        return self.determinism_check == "values" and not self.replay

    @functools.cached_property
    def comparable(self) -> bool:
        """Whether runs may be compared with runs before. ``NOTE [known runs]``."""
        as_usual = self.prune and self.policy is None and self.determinism_check == "default"
        return as_usual and not (self.replay or self.by_sight or self.records)

    @functools.cached_property
    def records(self) -> bool:
        """Whether what operations give is recorded."""
        return self.values or (self.debug and not self.replay)
