"""Code of the user's that torch's engine runs while a body pulls something back.

NOTE [code on a tape]
A body that calls `torch.autograd.grad` or ``.backward()``, or a transform that does, has hooks and
backwards of custom Functions run. The mode that shows a region its operations is not active inside
of one, and that call is one. What such code reads and draws is to be captured, recorded and
compared as what the body reads; so the mode is entered again where the engine is called. What the
engine hands to that code is told from what the code closes over by its memory, which the ledger has
seen the body, or the engine, write.
"""

from __future__ import annotations

import threading
from typing import Any

from functx._remat._answers import Answering


class _Running(threading.local):
    by: Any = None


_running = _Running()


class OnATape(Answering):
    """The part of a tracker that lets it see what a tape runs."""

    # Where a region inside was handed another tensor than it reads, and what it was.
    misread: tuple[int, str] | None = None

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that was recorded, on resolved arguments."""
        return func(*args, **kwargs)

    def run_a_tape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Likewise; it calls torch's engine."""
        around, _running.by = _running.by, self
        try:
            return self.execute(func, args, kwargs)
        finally:
            _running.by = around


def taken() -> Any:
    """The tracker of the body that pulls something back, for the one call of the engine."""
    by, _running.by = _running.by, None
    return by
