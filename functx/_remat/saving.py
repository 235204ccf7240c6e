"""Values that a policy saves (rule 6): it is asked while the region runs; replays get the values.

Random numbers are never saved, because a replay must advance the generators. The results of
operations that write in place are not saved either. In a traced graph, random numbers are always
saved: the graph has one mask, and the replay must not draw another one.

NOTE [kept around]
If an enclosing region saves a value, the value is in memory anyway. So a region inside saves it,
too. Otherwise its pullback would recompute a value that the policy of the enclosing region saves.
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
    """The results of one operation that a policy saves.

    These are the plain tensors that the operation returned, below all transforms. So they are the
    same values for every level and every order of derivatives.
    """

    def __init__(self, tensors: Iterable[Tensor], layout: Any, decision: Decision | None) -> None:
        self.layout = layout  # the layout of all results, in their nested structure
        self.decision = decision  # ``None`` if only enclosing regions want them
        self.tensors = [*tensors]  # until a node saves them
        self.memory = [*map(_torch.storage_of, self.tensors)]  # right after the operation
        self.read = {*self.memory}  # the memory of the results that the pullback reads
        # Whether the region writes to that memory later. A replay then gets copies.
        self.is_written = False


class Keeping:
    """The values that a region saves, by entry of its ledger. After `take`, its node has them."""

    def __init__(self, kept: dict[int, KeptResults]) -> None:
        self.kept = kept
        self._fetcher: offload.Fetcher | None = None

    def take(self) -> list[Tensor]:
        """The tensors for the node; copies in host memory for those that the policy offloads."""
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
        """The saved values, by entry, for a replay that begins now, from the node's ``tensors``."""
        if self._fetcher is not None:
            levels.at_depth(0, partial(self._fetcher.begin, dict(enumerate(tensors))))
        numbered = iter(enumerate(tensors))
        return {i: Given(kept, numbered, self._fetcher) for i, kept in self.kept.items()}

    def end(self) -> None:
        """Release the offloaded values that the replay has fetched."""
        if self._fetcher is not None:
            self._fetcher.end()


class Given:
    """The saved results of one operation, in a replay."""

    def __init__(
        self,
        kept: KeptResults,
        numbered: Iterator[tuple[int, Tensor]],
        fetcher: offload.Fetcher | None,
    ) -> None:
        self._kept, self._fetcher = kept, fetcher
        self._tensors = [next(numbered) if m in kept.read else None for m in kept.memory]

    def is_whole(self) -> bool:
        """Whether all results were saved."""
        return None not in self._tensors

    def value(self, rerun: Any) -> Any:
        """The results of the operation, with uninitialized memory for those that aren't saved."""
        tensors = iter(self._tensors)

        def one(layout: Any) -> Tensor:
            if (numbered := next(tensors)) is None:
                t = ledger.unwritten(layout)
                rerun.leave_out(t)
                return t
            number, kept = numbered
            if self._fetcher is not None and self._fetcher.brings(number):
                t = self._fetcher.value(number, kept)
            else:  # a new tensor, because autograd sets its history; a copy if the region writes
                t = kept.clone() if self._kept.is_written else same_value(kept, kept.detach)
            rerun.given.add(_torch.storage_of(t))
            return t

        return filled(self._kept.layout, one)


class Saver:
    """Asks a policy about each value of a region, and holds the saved values until it ends."""

    def __init__(self, policy: Policy, around: list[Container[int]]) -> None:
        self.policy, self._around = policy, around
        self.asks = asks_of_operations(policy)
        # The value to ask the policy about: while `checkpoint_name` copies a tensor, ...
        self.naming: Value | None = None
        # ... and in a batched call, the values that the call would compute for one example.
        self.examples: list[Value] | None = None
        self.kept: dict[int, KeptResults] = {}  # by entry
        self._at: dict[int, int] = {}  # by memory, the entry whose result it holds
        self._written: set[int] = set()  # memory that was overwritten since its operation
        # By memory, the value that the policy was asked about. Only for policies that read names.
        self._values: dict[int, Value] = {}

    def __contains__(self, storage: int) -> bool:
        """Whether the value in this memory is saved."""
        return self._at.get(storage) in self.kept

    def judge(self, number: int, entry: Entry, args: Any, kwargs: Any, out: Any) -> None:
        """Ask the policy about an operation that has run, and save its results if wanted."""
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
        if kept.memory == memory:  # none of the results is a view
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
        """The value to ask the policy about; ``None`` if no single example computes it."""
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
                "policy(ctx, op, *args, **kwargs), and must return a bool or a CheckpointPolicy."
            ) from error

    def named(self, t: Tensor, name: str, record: Record) -> bool:
        """Note the name of a plain tensor; returns whether to save a copy under that name.

        If ``t`` is a whole result of an operation, the result itself is saved, without a copy. If
        it was saved already, and the policy does not want it under that name, it is dropped. Until
        `naming` is reset, the operation that runs is the copy.
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
        """Save the operation result whose storage ``t`` uses; returns whether there is one.

        With ``decision=None``, save it only for enclosing regions.
        """
        storage = _torch.storage_of(t)
        number = record.made[storage][0]
        entry = record.entries[number]
        layout = entry.layout
        if entry.kind is not NEW or type(layout) is not tuple or storage in self._written:
            return False
        if _torch.tracing():
            if (t.shape, t.stride()) != layout[:2]:
                return False  # `t` is a view, so a copy is saved instead
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
        """Copy the saved values in memory that an operation is about to write to."""
        self._written.update(written)
        for storage in written:
            self._values.pop(storage, None)
            kept = self.kept.get(self._at.pop(storage, -1))
            if kept is not None:
                kept.is_written = True
                old = zip(kept.tensors, kept.memory)
                kept.tensors = [t.clone() if m == storage else t for t, m in old]

    def held(self) -> list[Tensor]:
        """All tensors saved by this region's or an enclosing region's policy.

        References to them from here do not come from a tape.
        """
        for number, kept in [*self.kept.items()]:
            only_around = kept.decision is None and not kept.is_written
            if only_around and not self._is_kept_around(kept.memory):
                del self.kept[number]
        around = [t for saver in self._around if isinstance(saver, Saver) for t in saver.held()]
        return around + [t for kept in self.kept.values() for t in kept.tensors]

    def settled(self, live: Any) -> Keeping:
        """The values to save in the end: those that the pullback reads."""
        kept, self.kept = {i: k for i, k in self.kept.items() if live[i]}, {}
        for k in kept.values():
            k.tensors = [t for t, m in zip(k.tensors, k.memory) if m in k.read]
            note_kept(k.tensors)
        return Keeping(kept)


def asks_of_operations(policy: Policy | None) -> bool:
    """Whether a policy decides by operations."""
    return policy is not None and policy.reads_operations and type(policy) is not Everything


def saver_for(policy: Policy | None, in_graph: bool) -> Saver | None:
    """The saver of a region that begins now; ``None`` if no value can be saved."""
    around = _kept_around()
    if policy is None and not around and not in_graph:
        return None
    return Saver(policy or Everything(False), around)


def _kept_around() -> list[Any]:
    return [kept for mode in ledger.ledgers() if (kept := mode.keeping()) is not None]


def is_kept_around() -> bool:
    """Whether an enclosing region saves values; its policy also decides on those made inside."""
    return bool(_kept_around())


def named(x: Tensor, name: str) -> Tensor:
    """Give a tensor a name, under which an enclosing region may save it."""
    note_name(levels.base_of(x), name)
    x = shown(x, name)
    for callback in observers.of_names:
        callback(levels.base_of(x), name)
    return x


def shown(x: Tensor, name: str) -> Tensor:
    """Show a tensor and its name to the listeners of enclosing regions; returns the tensor."""
    return handle_torch_function(shown, (x,), x, name) if has_torch_function_unary(x) else x


def kept_copy(x: Tensor, name: str) -> Tensor:
    """Copy a tensor to save it under a name. A ledger sees the copy as one operation."""
    return torch.clone(x)


def name(listener: Any, x: Tensor, name: str) -> Tensor:
    """Handle a call of `checkpoint_name`; returns the tensor, or a copy that is saved.

    In a forward the policies decide whether a copy is made. A replay makes one if the forward did.
    """
    (x,) = listener.take(NAMED, [x])
    t = levels.base_of(levels.alive(x))
    records = [mode for mode in ledger.ledgers() if isinstance(mode, Record)]
    for record in records:
        record.names |= {name}
    records = [record for record in records if record.saver]
    # (An input needs no copy, because a node saves it anyway.)
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
