"""Where storages are made: the operation, the line of the user's code and the module of each.

What the autograd engine runs has no line of its own: Python is where the backward pass was started.
But nodes are numbered, and an operation of the forward runs right after its node was made, so that
its line is known for the node. Python nodes (a custom Function, a region) run code with lines.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
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


REGION = "RegionNodeBackward"
"""The node of a region; what runs in it, and not in a node that it runs, is its replay."""


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
        self._changes: list[tuple[int, Held, int]] = []  # after which event, what, bytes
        self._until_peak = 0
        self._sites: dict[int, tuple[Place, str]] = {}  # by number of a node
        self._first = _torch.next_sequence_number()
        self._modules = ModulePaths()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; and remember its line, for the nodes that autograd has made for it."""
        number, here = _torch.next_sequence_number() - 1, None
        while number >= self._first and number not in self._sites:
            here = here or (where(), self._modules.here())
            self._sites[number] = here
            number -= 1
        before = len(self.timeline)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.phases += [_phase(_torch.current_node())] * (len(self.timeline) - before)
        return out

    def birth_of(self, storage: torch.UntypedStorage) -> Held | None:
        """What made a storage, or met it first."""
        block = self._blocks.get(id(storage))
        return None if block is None else block.origin

    def is_new(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage was made in the context."""
        return self._blocks[id(storage)].base == 0

    def at_the_peak(self) -> list[Held]:
        """What was live at the peak, largest first."""
        changes = self._changes[: self._until_peak]
        held, live = {id(one): one for _, one, _ in changes}, Counter[int]()
        for _, one, nbytes in changes:
            live[id(one)] += nbytes
        return [replace(held[key], nbytes=n) for key, n in live.most_common() if n > 0]

    def history(self) -> list[tuple[int, int, str]]:
        """Every change: after how many operations, by how many bytes, and whose they are."""
        return [(at, nbytes, held.place) for at, held, nbytes in self._changes]

    def _origin(self, tensor: torch.Tensor, name: str) -> Held:
        node = _torch.current_node()
        site = None
        if node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
            site = self._sites.get(_torch.sequence_number(node))
        place, module = site or (where(), self._modules.here())
        what = name, tuple(tensor.shape), tensor.dtype, tensor.device, 0
        return Held(*what, *line_of(place), module, _phase(node))

    def _add(self, origin: Any, nbytes: int) -> None:
        if not nbytes:
            return
        self.live += nbytes
        self._changes.append((len(self.timeline), origin, nbytes))
        if self.live > self.peak:
            self.peak = self.live
            self._until_peak = len(self._changes)
