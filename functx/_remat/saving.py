"""Policies asked, while a region runs, what to keep of its operations' results (rule 6).

Never kept are random numbers, since generators must advance, and what operations that write in
place return.

NOTE [kept around]
A value that a region around keeps is there in any case, so a region inside keeps it too; its
pullback would else compute again what the policy around it asks for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._policies import Decision, Everything, Policy, Value
from functx._remat import examples, levels
from functx._remat.kept import NOTHING, Keeping, Kept
from functx._remat.ledger import Entry, Ledger, Record
from functx._remat.operators import NEW, storage_of, tensors_in


class Saver:
    """Asks a policy about each value of a region, and holds what it keeps until the region has run.

    Attributes:
        asks: whether the policy looks at operations.
        naming: while a value is copied for its name, what the policy is asked about.
        examples: what the call at hand runs for one example; ``None`` where it is not batched.
    """

    def __init__(self, policy: Policy, around: list[Ledger]) -> None:
        self.policy, self._around = policy, around
        self.asks = policy.reads_operations and type(policy) is not Everything
        self.naming: Value | None = None
        self.examples: list[Value] | None = None
        self._kept: dict[int, Kept] = {}
        self._at: dict[int, int] = {}  # by memory, the entry whose result it holds
        self._free: set[int] = set()  # entries that only regions around want
        self._written: set[int] = set()  # memory that no longer holds what its operation returned
        self._values: dict[int, Value] = {}  # by memory, what was judged, where names matter

    def keeps(self, storage: int) -> bool:
        """Whether this memory is kept."""
        return self._at.get(storage) in self._kept

    def judge(self, number: int, entry: Entry, args: Any, kwargs: Any, out: Any) -> None:
        """An operation has run."""
        overload, kind, _, memory, layout = entry
        if kind is not NEW:
            return
        for storage in memory:
            self._values.pop(storage, None)
            self._written.discard(storage)
        decision = self._decide(overload, args, kwargs, out, memory) or None
        if decision is None and not self._is_kept_around(memory):
            return
        kept = Kept(map(_torch.detached_below_autograd, tensors_in((out,), None)), layout, decision)
        if kept.memory == memory:  # no view is among them
            self._keep(number, kept, memory)

    def _decide(
        self, overload: Any, args: Any, kwargs: Any, out: Any, memory: list[int]
    ) -> Decision:
        value = self.naming
        if value is None:
            if not self.policy.reads_operations:
                return Decision.RECOMPUTE
            value = self._value(overload, args, kwargs, out)
            if value is None:
                return Decision.RECOMPUTE
        decision = self._asked(value)
        value.forget()
        if self.policy.reads_names:
            for storage in memory:
                self._values[storage] = copy.copy(value)
        return decision

    def _value(self, overload: Any, args: Any, kwargs: Any, out: Any) -> Value | None:
        """What the policy is asked about; ``None`` for what no example runs."""
        if self.examples is None:
            return Value(overload, args, kwargs, out)
        for i, value in enumerate(self.examples):
            if examples.same(value, overload, out):
                del self.examples[: i + 1]
                return value
        return None

    def _asked(self, value: Value) -> Decision:
        try:
            return self.policy.decide(value)
        except Exception as error:
            from functx._remat import departures  # which imports the listener, and that this

            raise departures.refused(
                f"the policy {self.policy!r} raised for {value.func}: {error}. It is called as "
                "policy(ctx, op, *args, **kwargs), and returns a bool or a CheckpointPolicy."
            ) from error

    def named(self, t: Tensor, name: str, record: Record) -> bool:
        """A plain tensor is given a name; returns whether a copy is to be kept under it.

        A whole result of an operation is kept as it is, and dropped if it was kept and the policy
        does not want it by that name. Until `naming` is reset, what runs is the copy.
        """
        storage, decision = storage_of(t), Decision.RECOMPUTE
        is_whole = t.untyped_storage().nbytes() == t.numel() * t.element_size()
        if self.policy.reads_names:
            value = self._values.get(storage)
            if value is None or not is_whole:
                value = Value(None, (), {}, None, memo={} if value is None else value.memo)
            value.names |= {name}
            if is_whole:
                self._values[storage] = value
            self.naming = value
            decision = self._asked(value)
        number = self._at.get(storage, -1)
        if number in self._kept and number not in self._free:
            if is_whole and decision:
                self._kept[number].decision = decision
            elif is_whole and self.policy.reads_names and len(self._kept[number].memory) == 1:
                del self._kept[number]
            return False
        if decision:
            return not (is_whole and self._keep_result(t, record, decision))
        if number not in self._kept and self._is_kept_around([storage]):
            self._keep_result(t, record, None)
        return False

    def _keep_result(self, t: Tensor, record: Record, decision: Decision | None) -> bool:
        """Keep the result that ``t`` is in the memory of, if it is one; for others if ``None``."""
        storage = storage_of(t)
        number = record.made[storage][0]
        _, kind, _, memory, layout = record.entries[number]
        if kind is not NEW or type(layout) is not tuple or storage in self._written:
            return False
        with _torch.without_dispatch_modes(), _torch.fwd_grad_mode(False), torch.no_grad():
            out = levels.at_depth(0, lambda: t.detach().as_strided(layout[0], layout[1], 0))
        self._keep(number, Kept([out], layout, decision), memory)
        return True

    def _is_kept_around(self, memory: list[int]) -> bool:
        return any(mode.keeps(storage) for mode in self._around for storage in memory)

    def _keep(self, number: int, kept: Kept, memory: list[int]) -> None:
        self._free.discard(number)
        if kept.decision is None:
            kept.decision = Decision.SAVE
            self._free.add(number)
        self._kept[number] = kept
        self._at.update(dict.fromkeys(memory, number))

    def about_to_write(self, written: list[int]) -> None:
        """An operation is about to write to memory: what is kept is what was there before."""
        self._written.update(written)
        for storage in written:
            self._values.pop(storage, None)
            kept = self._kept.get(self._at.pop(storage, -1))
            if kept is not None:
                kept.about_to_write(storage)

    def held(self) -> list[Tensor]:
        """All that is kept here and around: who holds it is no tape."""
        for number in self._free:
            kept = self._kept.get(number)
            if kept is not None and not kept.is_written and not self._is_kept_around(kept.memory):
                del self._kept[number]
        around = [mode.saver.held() for mode in self._around if mode.saver is not None]
        own = [t for kept in self._kept.values() for t in kept.tensors if t is not None]
        return own + [t for tensors in around for t in tensors]

    def settled(self, live: Any) -> Keeping:
        """What is kept in the end: what the pullback reads."""
        kept, self._kept = self._kept, {}
        if live is not None:
            kept = {i: k for i, k in kept.items() if live[i]}
            for k in kept.values():
                k.drop_unread()
        return Keeping(kept)

    @property
    def kept(self) -> dict[int, Kept]:
        """By entry, what is kept."""
        return self._kept


def saver_for(policy: Policy | None) -> Saver | None:
    """What keeps values of a region that begins now; ``None`` if nothing can be kept."""
    around = [mode for mode in _ledgers() if mode.is_keeping()]
    if policy is None and not around:
        return None
    return Saver(policy or Everything(False), around)


def settled(saver: Saver | None, live: Any) -> Keeping:
    """What a region keeps in the end, which has run."""
    return NOTHING if saver is None else saver.settled(live)


def _ledgers() -> Iterator[Ledger]:
    for i in range(_torch.dispatch_depth()):
        mode = _torch.dispatch_mode_at(i)
        if isinstance(mode, Ledger):
            yield mode


def named(t: Tensor, name: str) -> tuple[list[Saver], bool]:
    """A plain tensor is given a name: who must be told when its copy has run, and whether to copy.

    An input needs no copy: a node keeps it in any case.
    """
    told: list[Saver] = []
    copied = False
    for mode in _ledgers():
        if isinstance(mode, Record) and mode.saver is not None and mode.has_made(storage_of(t)):
            told.append(mode.saver)
            copied |= mode.saver.named(t, name, mode)
    return told, copied
