"""What a region keeps of its operations' results: the policy, asked while the body runs first.

Kept values are tensors below all transforms: what an ATen operation returned. In a replay they are
handed out where that operation would run, so they mean the same at every level, in a second
pullback, and in the replay of a replay.
"""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._offload import to_host
from functx._policies import Decision, Everything, Policy, Value
from functx._policy_kinds import is_dot
from functx._remat._holders import holding, not_holding
from functx._remat._one_example import one_example
from functx._remat._step import Layout, laid_out
from functx._remat._tapes import tensors_of
from functx._remat._tracker import SILENT, tracking
from functx._torch_modules import module_path

IN_PLACE = 63
"""The place, among the results of an operation, of memory that it wrote to."""


def key_of(number: int, place: int) -> int:
    """One number for a result of an operation."""
    return number << 6 | place


def asks_per_example(policy: Policy) -> bool:
    """Whether it makes a difference that a policy is asked about one example of a batch."""
    return policy.reads_operations and type(policy) is not Everything


class StoodIn(enum.Enum):
    """What the replay of a region around this one gave for an operation, if it did not run it."""

    NOTHING = 0
    KEPT = 1
    """What it had kept: a region inside may keep it too, at no cost."""
    UNWRITTEN = 2
    """Memory nobody wrote to, which no region inside may keep."""


class _Now(threading.local):
    def __init__(self) -> None:
        self.savers: list[Saver] = []  # of the regions that are running, outermost first
        self.stood_in = StoodIn.NOTHING
        self.handed_out: dict[int, Tensor] = {}


now = _Now()


def standing_in(what: StoodIn, handed_out: dict[int, Tensor] | None = None) -> None:
    """A replay says what it does for the operation at hand.

    Args:
        what: it gives.
        handed_out: by place, the results that it had kept; nobody wrote to the others. Of those
            that it gave as copies, because they are going to be written to, what was copied.
    """
    now.stood_in = what
    now.handed_out = handed_out or {}


def stood_in() -> StoodIn:
    """What replays did for the operation that ran last."""
    return now.stood_in


def handed_out(place: int) -> Tensor | None:
    """What a replay had kept of the operation that ran last; ``None`` if it had not kept that."""
    return now.handed_out.get(place)


class Saver:
    """Asks a policy about what a body runs, and holds what may be kept until the body has run.

    Args:
        policy: what to ask.
        batch_sizes: of the ``vmap`` levels that the body runs under.
        copied: operations whose results are held until they are written to, only to be copied then.

    Attributes:
        copied: operations whose results were copied when something was going to write to them.
    """

    def __init__(
        self, policy: Policy, batch_sizes: Sequence[int] = (), copied: Collection[int] = ()
    ) -> None:
        self._policy = policy
        self._only_copied = frozenset(copied)
        self.copied: set[int] = set()
        self._held: dict[int, tuple[Tensor, Decision]] = {}
        self._in_place: set[int] = set()  # as memory has become, until it is written to again
        self._free: set[int] = set()  # kept by a region around this one anyway
        self._places: dict[int, int] = {}  # storage -> the key of its newest value
        self._lost: set[int] = set()  # memory whose newest value is none of these
        self._values: dict[int, Value] = {}  # storage -> what was judged, where names matter
        self._waiting: list[tuple[int, Any, list[tuple[int, Tensor, int]]]] = []
        self._counts: Counter[int] = Counter()
        holding(self._counts)
        self._batch = math.prod(batch_sizes)
        self.per_example = bool(batch_sizes) and asks_per_example(policy)

    def __enter__(self) -> None:
        now.savers.append(self)

    def __exit__(self, *exc: Any) -> None:
        if self in now.savers:
            now.savers.remove(self)

    def ran(
        self, number: int, func: Any, args: Any, kwargs: Any, out: Any, made: list[Any]
    ) -> None:
        """An operation ran.

        Args:
            number: its place in the region.
            func: the overload.
            args: its arguments.
            kwargs: likewise.
            out: what it returned.
            made: place, tensor and storage of each result in memory of its own.
        """
        if not made:
            return
        if self.per_example:
            self._waiting.append((number, func, [(i, t.detach(), s) for i, t, s in made]))
            for _, _, storage in made:
                self._counts[storage] += 1
            return
        if self._policy.reads_operations or self._policy.reads_names:
            if made[0][0] == IN_PLACE:
                out = made[0][1]  # what is kept is all of it
            value = Value(func, args, kwargs, out, number, module_path)
            self._judge(number, value, [(i, t.detach(), s) for i, t, s in made])

    def left_out(self, number: int, made: list[Any]) -> None:
        """A replay around this region left an operation out; perhaps the copy of it, too."""
        if number in self._only_copied:
            for place, t, storage in made:
                self._hold(key_of(number, place), t.detach(), storage, Decision.SAVE)

    def given(self, key: int, t: Tensor, storage: int) -> None:
        """A region around this one keeps the result anyway: ``t``, or a copy in other memory."""
        self._free.add(key)
        self._hold(key, t, _torch.storage_key(t), Decision.SAVE)
        self._places[storage] = key

    def _judge(self, number: int, value: Value, made: list[Any]) -> None:
        decision = self._policy.decide(value)
        value.forget()
        if not decision and number in self._only_copied:
            decision = Decision.SAVE
        for place, t, storage in made:
            key = key_of(number, place)
            self._places[storage] = key
            if self._policy.reads_names:
                self._values[storage] = Value(value.func, (), {}, None, memo=value.memo)
            if decision:
                self._hold(key, t, storage, decision)
                if place == IN_PLACE:
                    self._in_place.add(key)

    def _hold(self, key: int, t: Tensor, storage: int, decision: Decision) -> None:
        self._places[storage] = key
        self._lost.discard(storage)
        if key not in self._held:
            self._counts[storage] += 1
            self._held[key] = (t, decision)
        else:
            self._held[key] = (self._held[key][0], decision)

    def _drop(self, key: int, storage: int) -> None:
        if self._held.pop(key, None) is not None:
            self._counts[storage] -= 1

    def named(self, t: Tensor, storage: int, name: str, layout: Layout) -> None:
        """A value that covers all of its memory was given a name; it is kept as ``layout`` says."""
        if storage not in self._places or not self._policy.reads_names:
            return
        key = self._places[storage]
        value = self._values.setdefault(storage, Value(None, (), {}, None))
        value.names |= {name}
        decision = self._policy.decide(value)
        self._in_place.discard(key)
        if decision:
            self._hold(key, alias(t, layout), storage, decision)
        elif key not in self._free:
            self._drop(key, storage)

    def about_to_write(self, written: Sequence[Any]) -> None:
        """An operation may write to what is held: what is kept is the value from before."""
        if not (self._held or self._waiting):
            return
        # Copies are seen by regions around this one: they have to know what a copy reads.
        for t in tensors_of(*written):
            storage = _torch.storage_key(t)
            key = self._places.get(storage)
            if key in self._in_place:
                # No tape reads what nobody can see any more: it was not copied for that.
                self._drop(key, storage)
            elif key in self._held and _torch.storage_key(self._held[key][0]) == storage:
                held, decision = self._held.pop(key)
                self.copied.add(key >> 6)
                copy = self._moved(held, storage)
                if copy is not None:
                    self._held[key] = (copy, decision)
            for number, _, made in self._waiting:
                for i in reversed(range(len(made))):
                    if made[i][2] == storage:
                        place, held, _ = made.pop(i)
                        if place == IN_PLACE:
                            self._counts[storage] -= 1  # as above
                            continue
                        self.copied.add(number)
                        copy = self._moved(held, storage)
                        if copy is not None:
                            made.append((place, copy, _torch.storage_key(copy)))

    def wrote(self, number: int, storage: int) -> None:
        """An operation wrote in place: the memory holds another value now."""
        self._places[storage] = key_of(number, IN_PLACE)
        self._values.pop(storage, None)

    def lost(self, storage: int) -> None:
        """An operation wrote to several tensors, or would have: nothing of this can be kept."""
        self._places.pop(storage, None)
        self._lost.add(storage)
        self._values.pop(storage, None)

    def exported(self, storage: int) -> None:
        """Some memory may be written to, unseen, from now on."""
        key = self._places.get(storage)
        if key in self._held and _torch.storage_key(self._held[key][0]) == storage:
            self._drop(key, storage)
        for _, _, made in self._waiting:
            for i in reversed(range(len(made))):
                if made[i][2] == storage:
                    made.pop(i)
                    self._counts[storage] -= 1
        self.lost(storage)

    def keys(self) -> set[int]:
        """The results that may be kept."""
        return {key for key in self._held if key >> 6 not in self._only_copied}

    def take(self, keys: Sequence[int]) -> tuple[list[Tensor], dict[int, torch.device]]:
        """The values to keep, in this order, and where those come from that went to the host.

        All others are let go.
        """
        kept, devices = [], {}
        try:
            for key in keys:
                t, decision = self._held[key]
                if decision is Decision.OFFLOAD:
                    devices[key] = t.device
                    t = to_host(t)  # at which a replay of a region around this one may depart
                kept.append(t)
        finally:
            self.let_go()
        return kept, devices

    def let_go(self) -> None:
        """Hold nothing any more."""
        not_holding(self._counts)
        self._waiting.clear()
        self._held.clear()

    def _moved(self, held: Tensor, storage: int) -> Tensor | None:
        """A copy to hold instead; ``None`` if a replay around this region left it out."""
        copy = held.clone()
        self._counts[storage] -= 1
        if stood_in() is StoodIn.UNWRITTEN:
            return None
        self._counts[_torch.storage_key(copy)] += 1
        return copy

    def _judge_waiting(self, examples: Sequence[Value] | None) -> None:
        """Match what ran with the operations of one example; without them, judge what ran."""
        waiting, self._waiting = self._waiting, []
        at = 0
        for value in examples or ():
            for i in range(at, len(waiting)):
                if self._same(value, waiting[i]):
                    number, _, made = waiting[i]
                    value.number = number
                    self._judge(number, value, made)
                    at = i + 1
                    break
        for number, _, made in waiting:
            for place, _, storage in made:
                self._places.setdefault(storage, key_of(number, place))
                self._counts[storage] -= 1

    def _same(self, value: Value, ran: tuple[int, Any, list[Any]]) -> bool:
        _, func, made = ran
        if not made:
            return False
        outs, real = tensors_of(value.out), made[0][1]
        if not outs or outs[0].dtype != real.dtype:
            return False
        same = func.overloadpacket is value.func.overloadpacket
        if not same and not (is_dot(func) and is_dot(value.func)):
            return False
        one, all_of_them = outs[0].numel(), real.numel()
        if not one or not all_of_them:
            return one == all_of_them
        return all_of_them % one == 0 and self._batch % (all_of_them // one) == 0


def alias(t: Tensor, layout: Layout | None = None) -> Tensor:
    """Another tensor over the same memory, made where nobody watches; laid out anew, perhaps."""
    with tracking(SILENT), _torch.cleared_interpreter_stack():
        t = t.data  # of which torch counts no writes, see `_written_since`
        return t if layout is None else laid_out(t, layout)


def watched_per_example() -> bool:
    """Whether a policy has to be asked about one example of what runs. ``NOTE [one example]``."""
    savers = now.savers
    return any(saver.per_example for saver in savers) if savers else False


def kept_around() -> dict[int, Tensor]:
    """What the regions around, that are running, may keep, by memory; of it the newest value."""
    return {
        storage: t
        for saver in now.savers
        for key, (t, _) in saver._held.items()
        if (storage := _torch.storage_key(t)) not in saver._lost
        and saver._places.get(storage, key) == key
    }


def called(func: Any, args: Any, kwargs: Any) -> None:
    """A function of the body returned: what it ran is judged, by what one example would run."""
    savers = [s for s in now.savers if s._waiting]
    if savers:
        examples = one_example(func, args, kwargs)
        for saver in savers:
            saver._judge_waiting(None if examples is None else [_again(v) for v in examples])


def _again(value: Value) -> Value:
    return Value(value.func, value.args, value.kwargs, value.out, modules=value.modules)
