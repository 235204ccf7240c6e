"""Values that a policy keeps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functx._policies import Decision, Policy, Value
from functx._remat.ledger import layout_of
from functx._remat.operators import ALWAYS, NEW, Operator, storage_of, tensors_in


class Kept:
    """The results of one operation that a policy keeps."""

    def __init__(self, out: Any) -> None:
        self.layout = layout_of(out)
        self._tensors = tensors_in((out,), None)
        self.n = len(self._tensors)

    def tensors(self) -> list[Tensor]:
        """They themselves, until `take`."""
        return self._tensors

    def take(self) -> list[Tensor]:
        """Hand them over to the node."""
        taken, self._tensors = self._tensors, []
        return taken

    def given(self, tensors: list[Tensor]) -> Given:
        """With what the node has kept."""
        return Given(self.layout, tensors)


class Given:
    """Kept results, in a replay."""

    def __init__(self, layout: Any, tensors: list[Tensor]) -> None:
        self.layout, self.tensors = layout, tensors

    def value(self) -> Any:
        """What the operation returned."""
        it = iter(self.tensors)
        return _filled(self.layout, it)


def _filled(layout: Any, it: Any) -> Any:
    if layout is None:
        return None
    if type(layout) is tuple:
        return next(it).detach()  # autograd is going to write on it
    return [_filled(one, it) for one in layout]


class Saver:
    """Asks a policy about each value of a region."""

    def __init__(self, policy: Policy, region: Any) -> None:
        self.policy, self.region = policy, region
        self.kept: dict[int, Kept] = {}
        self.at: dict[int, int] = {}

    def judge(self, number: int, operator: Operator, args: Any, kwargs: Any, out: Any) -> None:
        """An operation has run."""
        if operator.kind is not NEW:
            return
        if self.policy.decide(Value(operator.overload, args, kwargs, out)) is not Decision.RECOMPUTE:
            kept = Kept(_detached(out))
            self.kept[number] = kept
            for t in kept.tensors():
                self.at[storage_of(t)] = number

    def forget(self, storages: list[int]) -> None:
        """Memory has been written to: what was kept there is no more."""
        for storage in storages:
            self.kept.pop(self.at.get(storage, -1), None)

    def drop_dead(self, live: Any) -> dict[int, Kept]:
        """Keep what the pullback reads only."""
        if live is not None:
            self.kept = {i: k for i, k in self.kept.items() if live[i]}
        return self.kept


def _detached(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.detach()
    return None if out is None else [_detached(o) for o in out]


__all__ = ["ALWAYS", "Saver"]
