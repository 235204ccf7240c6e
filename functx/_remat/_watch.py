"""Whether what runs is a body, which the dispatch modes of regions watch, or the engine itself.

The engine's own operations (a detach here and there) depend on what requires grad, which is not the
same in a forward and in its replays. So no record has them: not that of the region, and not that of
a region around it.
"""

from __future__ import annotations

from typing import Any

from functx import _torch


class Watcher(_torch.TorchDispatchMode):
    """A dispatch mode of a region.

    Attributes:
        paused: whether what runs is the engine's own.
    """

    only_observes = True
    _should_skip_dynamo = _torch.never_skip_dynamo

    def __init__(self) -> None:
        super().__init__()
        self.paused = False


class watching:
    """Run the enclosed code watched by all regions it is in, or by none."""

    __slots__ = ("_found", "_on")

    def __init__(self, on: bool) -> None:
        self._on = on

    def __enter__(self) -> None:
        self._found: list[tuple[Watcher, bool]] = []
        for i in range(_torch.dispatch_mode_depth()):
            mode = _torch.get_dispatch_mode_at(i)
            if isinstance(mode, Watcher):
                self._found.append((mode, mode.paused))
                mode.paused = not self._on

    def __exit__(self, *exc: Any) -> None:
        for mode, before in self._found:
            mode.paused = before
