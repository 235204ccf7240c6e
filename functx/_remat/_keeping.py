"""What custom Functions keep for their backwards beside numbers. NOTE [what hooks are bound to]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functx._remat._bound import Bound
from functx._remat._custom import Kept
from functx._remat._entry import custom_others


class Keeping:
    """The part of a tracker that knows what custom Functions keep."""

    def close(self, func: Any) -> None:
        """The arguments of an operation are complete."""
        raise NotImplementedError

    def keeps(self, others: Sequence[Kept]) -> None:
        """One keeps something."""
        self.binds([Bound(x) for _, _, x in others])

    def binds(self, kept: Sequence[Bound]) -> None:
        """One does, here or in a region inside."""
        self.close(custom_others)
