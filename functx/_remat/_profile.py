"""The names under which the forward and the replays of a region show in a profile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from functx import _torch
from functx._remat._observers import observed
from functx._remat._options import Options


def shown(options: Options, *, replay: bool = False) -> AbstractContextManager[Any]:
    """Show the enclosed run of a region: ``remat: f``, or ``remat: replay of f``.

    A pullback shows by what it holds: the replay, and the nodes that torch itself shows.
    """
    if options.replay:
        return _AS_THE_REPLAY
    of = "replay of " if replay else ""
    record = _torch.record_function(f"remat: {of}{options.name}")
    return observed(record, options.name) if replay else record


_AS_THE_REPLAY: AbstractContextManager[Any] = nullcontext()
