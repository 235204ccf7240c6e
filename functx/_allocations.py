"""What torch's allocator hands out in a call: for compiled code, whose operations no mode sees.

Workspace that a kernel allocates counts, unlike in `functx._storages`.
"""

from __future__ import annotations

from typing import Any

from functx._jit import is_compiled, reached
from functx._storages import Event
from functx._torch import allocator


def runs_compiled(f: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function, or what it reaches by closures, globals or arguments, is compiled."""
    try:
        return any(map(is_compiled, reached((f, args, kwargs))))
    except RecursionError:  # in objects nested too deep; code of `functx.jit` tells by itself
        return False


class Allocations:
    """A context that follows the bytes that are handed out, and given back.

    Attributes:
        live: bytes handed out in the context, less those given back.
        peak: the highest ``live``.
        timeline: one `Event` an allocation.
    """

    def __enter__(self) -> Allocations:
        self.live = self.peak = 0
        self.timeline: list[Event] = []
        allocator.begin()
        return self

    def __exit__(self, *raised: object) -> None:
        for nbytes in allocator.end():
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            name = "allocation" if nbytes > 0 else "release"
            self.timeline.append(Event(len(self.timeline), name, self.live))
