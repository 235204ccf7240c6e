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
    """The results of one operation that a policy keeps."""

    def __init__(self, tensors: Iterable[Tensor], layout: Any, decision: Decision | None) -> None:
        self.layout = layout  # of all results, nested as they are
        self.decision = decision  # ``None`` where only regions around want them
        self.tensors = [*tensors]  # until a node keeps them
        self.memory = [*map(storage_of, self.tensors)]  # when the operation had run
        self.read = {*self.memory}  # the memory of those that the pullback reads
        self.is_written = False  # later, to that memory: a replay hands out copies


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
            for t in kept.tensors:
                if kept.decision is Decision.OFFLOAD:
                    devices[len(taken)] = t.device
                    t = hosts[len(taken)] = levels.at_depth(0, partial(_offload.to_host, t))
                taken.append(t)
            kept.tensors = []
        if hosts:
            self._fetcher = _offload.Fetcher(hosts, devices)
        return taken

    def given(self, tensors: Sequence[Tensor]) -> dict[int, Given]:
        """The same with what the node has kept, for a replay that begins now."""
        if self._fetcher is not None:
            levels.at_depth(0, partial(self._fetcher.begin, dict(enumerate(tensors))))
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
