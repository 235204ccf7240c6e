"""Follow storages, and remember at which line of the user's code each was made: for profiles.

What the autograd engine runs has no line of its own: Python is where the backward pass was started.
But nodes are numbered, and an operation of the forward runs right after its node was made, so that
its line is known for the node. Python nodes (a custom Function, a region) run code with lines.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from functx import _torch
from functx._lines import ModulePaths, Place, line_of, where
from functx._storages import LiveStorages


@dataclass(frozen=True)
class Held:
    """What holds bytes: a storage, and the operation that made it.

    Attributes:
        operation: its name, as in ``Profile.timeline``.
        shape: of the result, below all transforms.
        dtype: likewise.
        device: likewise.
        nbytes: bytes that it held at the peak.
        file: of the line outside of torch and functx that called the operation; in a backward pass
            that of the forward operation whose derivative it is a part of, where that is known.
        line: its number.
        function: what the line is in.
        module: the path of the ``nn.Module`` that was running, from the outermost.
        phase: ``"forward"``, ``"backward"``, or ``"replay"``: of a region, in a backward pass.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    file: str
    line: int
    function: str
    module: str
    phase: str

    @property
    def place(self) -> str:
        """``"net.py:12 in attention"``, ``"backward of net.py:12 in attention"``."""
        of = "" if self.phase == "forward" else f"{self.phase} of "
        return f"{of}{os.path.basename(self.file)}:{self.line} in {self.function}"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        module = f" ({self.module})" if self.module else ""
        return f"{self.operation}, {dtype}{list(self.shape)}, {self.place}{module}"


@dataclass(eq=False)
class _Birth:
    """Where a storage was made; the line is looked up only if somebody asks."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    place: Place
    module: str
    phase: str

    def held(self, nbytes: int) -> Held:
        """As users see it."""
        what = self.operation, self.shape, self.dtype, self.device
        return Held(*what, nbytes, *line_of(self.place), self.module, self.phase)


REGION = "RegionNodeBackward"
"""The node of a region; what runs in it, and not in a node that it runs, is its replay."""

MOST = 16
"""Nodes that one operation makes, at most: one for each level of transforms."""


def _phase(node: Any) -> str:
    if node is None:
        return "forward"
    return "replay" if type(node).__name__ == REGION else "backward"


class TracedStorages(LiveStorages):
    """`LiveStorages` that knows the line at which each storage was made.

    Attributes:
        phases: for each event of the timeline, what it is a part of, as in `Held`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[str] = []
        self._changes: list[tuple[int, _Birth, int]] = []  # after which event, what, bytes
        self._until_peak = 0
        self._places: dict[int, tuple[Place, str]] = {}  # by number of a node
        self._modules = ModulePaths()
        self._last: dict[int, int] = {}  # by thread, each of which numbers its own nodes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; and remember its line, for the node that autograd has made for it."""
        number, thread = _torch.next_sequence_number() - 1, threading.get_ident()
        last = self._last.setdefault(thread, number - 1)
        if number > last:
            here = (where(), self._modules.here())
            for one in range(max(last, number - MOST) + 1, number + 1):
                self._places[one] = here
            self._last[thread] = number
        before = len(self.timeline)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.phases += [_phase(_torch.current_node())] * (len(self.timeline) - before)
        return out

    def birth_of(self, storage: torch.UntypedStorage) -> Held | None:
        """What made a storage, or met it first."""
        block = self._blocks.get(id(storage))
        return None if block is None else block.origin.held(storage.nbytes())

    def is_new(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage was made in the context."""
        return self._blocks[id(storage)].base == 0

    def at_the_peak(self) -> list[Held]:
        """What was live at the peak, largest first."""
        live: Counter[_Birth] = Counter()
        for _, birth, nbytes in self._changes[: self._until_peak]:
            live[birth] += nbytes
        return [birth.held(nbytes) for birth, nbytes in live.most_common() if nbytes > 0]

    def history(self) -> list[tuple[int, int, str]]:
        """Every change: after how many operations, by how many bytes, and whose they are."""
        labels: dict[_Birth, str] = {}
        for _, birth, _ in self._changes:
            labels.setdefault(birth, birth.held(0).place)
        return [(at, nbytes, labels[birth]) for at, birth, nbytes in self._changes]

    def _origin(self, tensor: torch.Tensor, name: str) -> _Birth:
        node = _torch.current_node()
        found = None
        if node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
            found = self._places.get(_torch.sequence_number(node))
        place, module = (where(), self._modules.here()) if found is None else found
        what = name, tuple(tensor.shape), tensor.dtype, tensor.device
        return _Birth(*what, place, module, _phase(node))

    def _add(self, origin: Any, nbytes: int) -> None:
        if not nbytes:
            return
        self.live += nbytes
        self._changes.append((len(self.timeline), origin, nbytes))
        if self.live > self.peak:
            self.peak = self.live
            self._until_peak = len(self._changes)
