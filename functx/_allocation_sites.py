"""Where storages are made: the operation, the line of the user's code and the module of each.

What the autograd engine runs has no line of its own: Python is where the backward pass was started.
But nodes are numbered, and an operation of the forward runs right after its node was made, so that
its line is known for the node. Python nodes (a custom Function, a region) run code with lines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from functx import _torch
from functx._lines import ModulePaths, Place, line_of, where

REGION = "RegionNodeBackward"
"""The node of a region; what runs in it, and not in a node that it runs, is its replay."""


@dataclass(frozen=True)
class Held:
    """What holds bytes: a storage, and the operation that made it.

    Attributes:
        operation: its name, as in ``Profile.timeline``.
        shape, dtype, device: of the result, below all transforms.
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


def phase_now() -> str:
    """What the operation that runs now is a part of, as in `Held`."""
    node = _torch.current_node()
    if node is None:
        return "forward"
    return "replay" if type(node).__name__ == REGION else "backward"


class AllocationSites:
    """Lines and modules, of what runs now and of the nodes that were made since."""

    def __init__(self) -> None:
        self._of_nodes: dict[int, tuple[Place, str]] = {}  # by number
        self._first = _torch.next_sequence_number()
        self._modules = ModulePaths()

    def note_nodes(self) -> None:
        """An operation is about to run, for which autograd has made nodes."""
        number, site = _torch.next_sequence_number() - 1, None
        while number >= self._first and number not in self._of_nodes:
            site = site or (where(), self._modules.here())
            self._of_nodes[number] = site
            number -= 1

    def made(self, tensor: torch.Tensor, operation: str) -> Held:
        """What an operation has made here."""
        node, site = _torch.current_node(), None
        if node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
            site = self._of_nodes.get(_torch.sequence_number(node))
        place, module = site or (where(), self._modules.here())
        what = operation, tuple(tensor.shape), tensor.dtype, tensor.device, 0
        return Held(*what, *line_of(place), module, phase_now())
