"""What a region inside another one keeps: decided in the forward, and the same in replays.

A replay of the outer region runs the inner one for the first time once more. What the inner one
keeps decides what the outer one's pullback reads, so the policy is not asked again; and what it
copies, because it may keep it and something writes to it, the outer one has in its record. So it is
for the regions inside the inner one, all the way down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from functx._policies import Decision, OfOperation, Policy, Value
from functx._remat._saving import Saver


class Slot:
    """What one region keeps: keys of results, which of them in host memory, and what it copied.

    All are known once it has run. ``inside`` are those of the regions in it, in their order. Of a
    function with a budget it is the ``plan``.
    """

    again = False
    copied: Set[int] = frozenset()
    keys: Sequence[int] | None = None
    on_host: Set[int] = frozenset()
    plan: Any = None

    def __init__(self) -> None:
        self.inside: list[Slot] = []

    def says(self, keys: Sequence[int] | None, on_host: Set[int], copied: Set[int]) -> None:
        """The region has run. What was decided before stays, also where less could be kept."""
        if not self.again:
            self.keys, self.on_host, self.copied = keys, on_host, copied


class AsBefore(OfOperation):
    """The results that were kept in the forward."""

    def __init__(self, slot: Slot) -> None:
        self._kept = {key >> 6 for key in slot.keys or ()}
        self._on_host = {key >> 6 for key in slot.on_host}

    def judge(self, value: Value) -> Decision | bool:
        """By place in the region."""
        return Decision.OFFLOAD if value.number in self._on_host else value.number in self._kept


class Inside:
    """What the regions inside one keep, as they begin.

    Args:
        slots: where it is written down.
        decided: what was decided in an earlier run of the same.
    """

    def __init__(self, slots: list[Slot] | None, decided: Iterable[Slot] = ()) -> None:
        self._slots = slots
        self._decided = iter(decided)

    def begins(self) -> Slot:
        """The next region."""
        found = next(self._decided, None)
        slot = Slot()
        if found is not None:
            slot.inside, slot.plan = found.inside, found.plan
            if found.keys is not None:
                slot.says(found.keys, found.on_host, found.copied)
                slot.again = True
        if self._slots is not None:
            self._slots.append(slot)
        return slot


def keeps_deep_inside(slot: Slot) -> bool:
    """Whether a region in a region in this one keeps something.

    A derivative of the pullback may flow through what that was computed from, which the ledger of
    this one does not see; so all inputs are kept.
    """
    deep = [inner for one in slot.inside for inner in one.inside]
    return any(one.keys for one in deep) or any(map(keeps_deep_inside, slot.inside))


def slot_of(region: Any) -> Slot:
    """Where it says what a region that begins now keeps."""
    return Slot() if region.outer is None else region.outer.inside.begins()


def saver_of(region: Any, slot: Slot) -> Saver | None:
    """Who decides what a region keeps; ``None`` if nothing is."""
    policy: Policy | None = region.options.policy
    if slot.again:
        copied = slot.copied - {key >> 6 for key in slot.keys or ()}
        return Saver(AsBefore(slot), copied=copied) if slot.keys or copied else None
    if policy is None:
        return None
    return Saver(policy, [f.batch_size for f in region.frames if f.batch_size is not None])
