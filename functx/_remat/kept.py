"""What a region keeps beside its inputs: results of operations, here and then with its node.

They are tensors below all transforms: what an ATen operation returned. A replay hands them out
where that operation would run, so they mean the same at every level and in every order
of derivatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from functx import _offload
from functx._policies import Decision
from functx._remat import ledger, levels
from functx._remat.operators import storage_of


class Kept:
    """The results of one operation that a policy keeps.

    Attributes:
        layout: of all results, nested as they are.
        tensors: the results; ``None`` where nobody reads one.
        memory: where they were when the operation had run.
        read: the memory of those that are read; set when the region has run.
        decision: whether they go to host memory; ``None`` where only regions around want them.
        is_written: whether that memory was written to later; a replay must hand out copies.
    """

    __slots__ = ("decision", "is_written", "layout", "memory", "read", "tensors")

    def __init__(self, tensors: Iterable[Tensor], layout: Any, decision: Decision | None) -> None:
        self.layout, self.decision = layout, decision
        self.tensors: list[Any] = [*tensors]
        self.memory = [*map(storage_of, self.tensors)]
        self.read = {*self.memory}
        self.is_written = False

    def about_to_write(self, storage: int) -> None:
        """Keep what is there now."""
        self.is_written = True
        for i, t in enumerate(self.tensors):
            if self.memory[i] == storage and t is not None:
                self.tensors[i] = t.clone()

    def drop_unread(self) -> None:
        """Keep what is read only."""
        for i, storage in enumerate(self.memory):
            if storage not in self.read:
                self.tensors[i] = None


class Keeping:
    """What a region keeps, by entry of its ledger: here until `take`, then with its node."""

    def __init__(self, kept: dict[int, Kept]) -> None:
        self.kept = kept
        self._fetcher: _offload.Fetcher | None = None

    def take(self) -> list[Tensor]:
        """The tensors, for the node; those that the policy offloads, as copies in host memory."""
        taken: list[Tensor] = []
        hosts, devices = {}, {}
        for kept in self.kept.values():
            for place, t in enumerate(kept.tensors):
                if t is None:
                    continue
                if kept.decision is Decision.OFFLOAD:
                    devices[len(taken)] = t.device
                    t = hosts[len(taken)] = levels.at_depth(0, partial(_offload.to_host, t))
                taken.append(t)
                kept.tensors[place] = None
        if hosts:
            self._fetcher = _offload.Fetcher(hosts, devices)
        return taken

    def given(self, tensors: Sequence[Tensor]) -> dict[int, Given]:
        """The same with what the node has kept, for a replay that begins now."""
        if self._fetcher is not None:
            levels.at_depth(0, lambda: self._fetcher.begin(dict(enumerate(tensors))))
        numbered = iter(enumerate(tensors))
        return {i: Given(kept, numbered, self._fetcher) for i, kept in self.kept.items()}

    def end(self) -> None:
        """The replay has ended."""
        if self._fetcher is not None:
            self._fetcher.end()


NOTHING = Keeping({})


class Given:
    """The kept results of one operation, in a replay."""

    def __init__(
        self, kept: Kept, numbered: Iterator[tuple[int, Tensor]], fetcher: _offload.Fetcher | None
    ) -> None:
        self._kept, self._fetcher = kept, fetcher
        self._tensors = [next(numbered) if m in kept.read else None for m in kept.memory]

    def is_whole(self) -> bool:
        """Whether all results were kept."""
        return None not in self._tensors

    def value(self, rerun: Any) -> Any:
        """What the operation returned."""
        return self._filled(self._kept.layout, iter(self._tensors), rerun)

    def _filled(self, layout: Any, tensors: Iterator[Any], rerun: Any) -> Any:
        if type(layout) is list:
            return [self._filled(one, tensors, rerun) for one in layout]
        if type(layout) is not tuple:
            return layout
        numbered = next(tensors)
        if numbered is None:
            t = ledger.unwritten(layout)
            rerun.leave_out(t)
            return t
        number, kept = numbered
        if self._fetcher is not None and self._fetcher.brings(number):
            t = self._fetcher.value(number, kept)
        else:  # autograd is going to write on the tensor, and perhaps the region to its memory
            t = kept.clone() if self._kept.is_written else kept.detach()
        rerun.given.add(storage_of(t))
        return t
