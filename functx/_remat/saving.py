"""What a policy keeps of a region's results (rule 6): asked while it runs, handed out in a replay.

Never kept are random numbers, since generators must advance, and what operations that write in
place return. In a graph that is traced random numbers always are: it has one mask, which nobody
draws again.

NOTE [kept around]
A value that a region around keeps is there in any case, so a region inside keeps it too; its
pullback would else compute again what the policy around it asks for.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from functx import _torch
from functx._policies import Decision, Everything, Policy, Value, offload
from functx._remat import departures, examples, ledger, levels
from functx._remat.calls import NAMED
from functx._remat.ledger import Entry, Record, filled
from functx._remat.observers import observers
from functx._remat.operators import DRAWN, NEW, tensors_in
from functx._torch.graphs import note_kept, note_name, same_value


class KeptResults:
    """The results of one operation that a policy keeps: what it returned, below all transforms.

    So they mean the same at every level and in every order of derivatives.
    """

    def __init__(self, tensors: Iterable[Tensor], layout: Any, decision: Decision | None) -> None:
        self.layout = layout  # of all results, nested as they are
        self.decision = decision  # ``None`` where only regions around want them
        self.tensors = [*tensors]  # until a node keeps them
        self.memory = [*map(_torch.storage_of, self.tensors)]  # when the operation had run
        self.read = {*self.memory}  # the memory of those that the pullback reads
        self.is_written = False  # later, to that memory: a replay hands out copies


class Keeping:
    """What a region keeps, by entry of its ledger: here until `take`, then with its node."""

    def __init__(self, kept: dict[int, KeptResults]) -> None:
        self.kept = kept
        self._fetcher: offload.Fetcher | None = None

    def take(self) -> list[Tensor]:
        """The tensors, for the node; those that the policy offloads, as copies in host memory."""
        taken: list[Tensor] = []
        hosts, devices = {}, {}
        for kept in self.kept.values():
            for t in kept.tensors:
                if kept.decision is Decision.OFFLOAD:
                    devices[len(taken)] = t.device
                    t = hosts[len(taken)] = levels.at_depth(0, partial(offload.to_host, t))
                taken.append(t)
            kept.tensors = []
        if hosts:
            self._fetcher = offload.Fetcher(hosts, devices)
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


class Given:
    """The kept results of one operation, in a replay."""

    def __init__(
        self,
        kept: KeptResults,
        numbered: Iterator[tuple[int, Tensor]],
        fetcher: offload.Fetcher | None,
    ) -> None:
        self._kept, self._fetcher = kept, fetcher
        self._tensors = [next(numbered) if m in kept.read else None for m in kept.memory]

    def is_whole(self) -> bool:
        """Whether all results were kept."""
        return None not in self._tensors

    def value(self, rerun: Any) -> Any:
        """What the operation returned."""
        tensors = iter(self._tensors)

        def one(layout: Any) -> Tensor:
            if (numbered := next(tensors)) is None:
                t = ledger.unwritten(layout)
                rerun.leave_out(t)
                return t
            number, kept = numbered
            if self._fetcher is not None and self._fetcher.brings(number):
                t = self._fetcher.value(number, kept)
            else:  # autograd is going to write on the tensor, and perhaps the region to its memory
                t = kept.clone() if self._kept.is_written else same_value(kept, kept.detach)
            rerun.given.add(_torch.storage_of(t))
            return t

        return filled(self._kept.layout, one)


class Saver:
    """Asks a policy about each value of a region, and holds what it keeps until the region ends."""

    def __init__(self, policy: Policy, around: list[Container[int]]) -> None:
        self.policy, self._around = policy, around
        self.asks = asks_of_operations(policy)
        # What the policy is asked about while a value is copied for its name, ...
        self.naming: Value | None = None
        # ... and in a batched call: what the call runs for one example.
        self.examples: list[Value] | None = None
        self.kept: dict[int, KeptResults] = {}  # by entry
        self._at: dict[int, int] = {}  # by memory, the entry whose result it holds
        self._written: set[int] = set()  # memory that no longer holds what its operation returned
        self._values: dict[int, Value] = {}  # by memory, what was judged, where names matter

    def __contains__(self, storage: int) -> bool:
        """Whether what is in this memory is kept."""
        return self._at.get(storage) in self.kept

    def judge(self, number: int, entry: Entry, args: Any, kwargs: Any, out: Any) -> None:
        """An operation has run."""
        overload, memory, layout = entry.overload, [*entry.writes], entry.layout
        if entry.kind not in (NEW, DRAWN):
            return
        for storage in memory:
            self._values.pop(storage, None)
            self._written.discard(storage)
        decision = self._decide(overload, args, kwargs, out, memory) or None
        if entry.kind is DRAWN:
            decision = Decision.SAVE
        if decision is None and not self._is_kept_around(memory):
            return
        tensors = tensors_in((out,), None)
        twins = [same_value(t, partial(_torch.detached_below_autograd, t)) for t in tensors]
        kept = KeptResults(twins, layout, decision)
        if kept.memory == memory:  # no view is among them
            self._keep(number, kept)

    def _decide(
        self, overload: Any, args: Any, kwargs: Any, out: Any, memory: list[int]
    ) -> Decision:
        value = self.naming
        if value is None and self.policy.reads_operations:
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
            if examples.is_batched_form(value.func, overload, value.out, out):
                del self.examples[: i + 1]
                return value
        return None

    def _asked(self, value: Value) -> Decision:
        try:
            return self.policy.decide(value)
        except Exception as error:
            raise departures.refused(
                f"the policy {self.policy!r} raised for {value.func}: {error}. It is called as "
                "policy(ctx, op, *args, **kwargs), and returns a bool or a CheckpointPolicy."
            ) from error

    def named(self, t: Tensor, name: str, record: Record) -> bool:
        """A plain tensor is given a name; returns whether a copy is to be kept under it.

        A whole result of an operation is kept as it is, and dropped if it was kept and the policy
        does not want it by that name. Until `naming` is reset, what runs is the copy.
        """
        storage, decision = _torch.storage_of(t), Decision.RECOMPUTE
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
        kept = self.kept.get(self._at.get(storage, -1))
        if kept is not None and kept.decision is not None:
            if is_whole and decision:
                kept.decision = decision
            elif is_whole and self.policy.reads_names and len(kept.memory) == 1:
                del self.kept[self._at[storage]]
            return False
        if decision:
            return not (is_whole and self._keep_result(t, record, decision))
        if kept is None and self._is_kept_around([storage]):
            self._keep_result(t, record, None)
        return False

    def _keep_result(self, t: Tensor, record: Record, decision: Decision | None) -> bool:
        """Keep the result that ``t`` is in the memory of, if it is one; for others if ``None``."""
        storage = _torch.storage_of(t)
        number = record.made[storage][0]
        entry = record.entries[number]
        layout = entry.layout
        if entry.kind is not NEW or type(layout) is not tuple or storage in self._written:
            return False
        if _torch.tracing():
            if (t.shape, t.stride()) != layout[:2]:
                return False  # a view: a copy of it is kept
            out = levels.detached(t)
        else:
            with _torch.without_dispatch_modes(), _torch.fwd_grad_mode(False), torch.no_grad():
                out = levels.at_depth(0, lambda: t.detach().as_strided(layout[0], layout[1], 0))
        self._keep(number, KeptResults([out], layout, decision))
        return True

    def _is_kept_around(self, memory: list[int]) -> bool:
        return any(storage in kept for kept in self._around for storage in memory)

    def _keep(self, number: int, kept: KeptResults) -> None:
        self.kept[number] = kept
        self._at.update(dict.fromkeys(kept.memory, number))

    def about_to_write(self, written: list[int]) -> None:
        """An operation is about to write to memory: what is kept is what was there before."""
        self._written.update(written)
        for storage in written:
            self._values.pop(storage, None)
            kept = self.kept.get(self._at.pop(storage, -1))
            if kept is not None:
                kept.is_written = True
                old = zip(kept.tensors, kept.memory)
                kept.tensors = [t.clone() if m == storage else t for t, m in old]

    def held(self) -> list[Tensor]:
        """All that is kept here and around: who holds it is no tape."""
        for number, kept in [*self.kept.items()]:
            only_around = kept.decision is None and not kept.is_written
            if only_around and not self._is_kept_around(kept.memory):
                del self.kept[number]
        around = [t for saver in self._around if isinstance(saver, Saver) for t in saver.held()]
        return around + [t for kept in self.kept.values() for t in kept.tensors]

    def settled(self, live: Any) -> Keeping:
        """What is kept in the end: what the pullback reads."""
        kept, self.kept = {i: k for i, k in self.kept.items() if live[i]}, {}
        for k in kept.values():
            k.tensors = [t for t, m in zip(k.tensors, k.memory) if m in k.read]
            note_kept(k.tensors)
        return Keeping(kept)


def asks_of_operations(policy: Policy | None) -> bool:
    """Whether a policy looks at operations."""
    return policy is not None and policy.reads_operations and type(policy) is not Everything


def saver_for(policy: Policy | None, in_graph: bool) -> Saver | None:
    """What keeps values of a region that begins now; ``None`` if nothing can be kept."""
    around = _kept_around()
    if policy is None and not around and not in_graph:
        return None
    return Saver(policy or Everything(False), around)


def _kept_around() -> list[Any]:
    return [kept for mode in ledger.ledgers() if (kept := mode.keeping()) is not None]


def is_kept_around() -> bool:
    """Whether a region around keeps values, and so asks about the operations of one inside."""
    return bool(_kept_around())


def named(x: Tensor, name: str) -> Tensor:
    """A tensor, which a region around may keep under a name."""
    note_name(levels.base_of(x), name)
    x = shown(x, name)
    for callback in observers.of_names:
        callback(levels.base_of(x), name)
    return x


def shown(x: Tensor, name: str) -> Tensor:
    """A tensor with a name, shown to the listeners of regions around."""
    return handle_torch_function(shown, (x,), x, name) if has_torch_function_unary(x) else x


def kept_copy(x: Tensor, name: str) -> Tensor:
    """What a wanted name becomes: one operation that a ledger sees."""
    return torch.clone(x)


def name(listener: Any, x: Tensor, name: str) -> Tensor:
    """A value is given a name: a copy, where a policy wants it; in a replay, where one was."""
    (x,) = listener.take(NAMED, [x])
    t = levels.base_of(levels.alive(x))
    records = [mode for mode in ledger.ledgers() if isinstance(mode, Record)]
    for record in records:
        record.names |= {name}
    records = [record for record in records if record.saver]
    # (An input needs no copy: a node keeps it in any case.)
    records = [record for record in records if record.has_made(_torch.storage_of(t))]
    copied = True in [record.saver.named(t, name, record) for record in records]
    if listener.expected is not None:
        due, number = listener.due, listener.number_of(x)
        copied = due is not None and due.func is kept_copy and due.given[1:] == [(name,)]
        copied = copied and (number is None or due.given[0] == number)
    if copied:
        x = listener.call(kept_copy, (x, name), {})
    for record in records:
        record.saver.naming = None
    return x
