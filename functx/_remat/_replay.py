"""A later run of a region: it gets what the forward saw, and must do what the forward did.

Externals are handed out by position (``NOTE [externals]`` in `_region`). Every operation is
compared with the record of the first run; a replay that departs from it raises, naming where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor

from functx import _torch
from functx._places import where
from functx._remat._aliases import PassedOn, known_again
from functx._remat._answers import by_the_user, told_again
from functx._remat._arguments import NUMBERS, TENSOR, same
from functx._remat._departure import WHY, departed
from functx._remat._entry import (
    KNOWN,
    MADE_HERE,
    MAKES,
    REWRAPPED,
    Entry,
    custom_state,
    describe,
    nested_run,
    nested_values,
)
from functx._remat._functions import known as known_functions
from functx._remat._functions import known_of
from functx._remat._hung_on_given import LEFT, hung_already
from functx._remat._interrupted import iterators_and_caches
from functx._remat._letting_go import Passing
from functx._remat._parts import Parts
from functx._remat._past_torch import AllHeld
from functx._remat._prune import Pruned
from functx._remat._tapes import leads_to, rewrap
from functx._remat._tracker import Tracker
from functx._torch import sequence_number
from functx._torch_nodes import GRAD_FN

NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Replay(Tracker):
    """The tracker of a replay.

    Args:
        entries: what the first run recorded.
        externals: the tensors to hand out.
        name: of the region, for messages.
        left: numbers of the tensors that left the region in its forward, of those it made.
        passed_on: what was one tensor in the forward, by which names.
    """

    _at = _slot = 0
    _made = -1
    # Whether operations that only compute are compared, and no more: `_run_ordinary`.
    _plain = True
    passing: Passing | None = None
    pruned: Pruned | None = None

    def __init__(
        self,
        entries: Sequence[Entry],
        externals: Sequence[Tensor],
        name: str,
        left: Sequence[int] = (),
        passed_on: Sequence[PassedOn] = (),
    ) -> None:
        super().__init__()
        if passed_on:
            self.aliases = known_again(passed_on, externals)
        self._entries = entries
        self._externals = externals
        self._external_ids = {id(t) for t in externals}
        self._name = name
        self._depth = _torch.interpreter_depth()
        self._start = _torch.next_sequence_number()
        self._engine = _torch.current_graph_task_id()
        self.left: dict[int, Any] = dict.fromkeys(left)
        self._numbers: dict[int, int] = {}  # what was made, as sources, by id

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation; nearly all of them are `_run_ordinary`, which does the same."""
        try:
            known = known_functions[func]
        except (KeyError, TypeError):
            known = known_of(func)
        if self._plain and not kwargs:
            if known.ordinary and self._at < len(self._entries):
                return self._run_ordinary(func, args)
            if known.nothing:
                return func(*args)
        return super().run(func, args, kwargs)

    def _run_ordinary(self, func: Any, args: Any) -> Any:
        """An operation in C that only computes."""
        # Arguments as `resolve` takes them, written out: nearly all tensors come by here, and a
        # call for each would take longer than the comparison.
        at, externals = self._at, self._externals
        entry = self._entries[at]
        sources, scalars, numbers = entry.sources, self._scalars, self._numbers
        slot, n = self._slot, len(sources)
        swapped: list[Any] = []
        for a in args:
            if isinstance(a, Tensor):
                source = sources[slot] if slot < n else MADE_HERE
                if scalars:
                    scalars.append(TENSOR)
                if source >= 0:
                    a = externals[source]
                elif numbers.get(id(a)) != source and (
                    source != MADE_HERE
                    or id(a) in self._external_ids
                    or ((node := a.grad_fn) is not None and sequence_number(node) < self._start)
                ):
                    self._slot = slot
                    a = self.resolve(a)
                slot += 1
            elif a.__class__ in NUMBERS:
                scalars.append(a)
            else:
                self._slot = slot
                a = self.swap(a)
                slot = self._slot
            swapped.append(a)
        if (
            entry.func is func
            and slot == n
            and len(scalars) == len(entry.scalars)
            and all(map(is_, scalars, entry.scalars))
        ):
            self._at = at + 1
            self._slot = 0
            if scalars:
                self._scalars = []
        else:
            self._slot = slot
            self.close(func)
        pruned = self.pruned
        if pruned is None or at not in (pruned.sections or ()):
            out = func(*swapped)
        else:
            out = pruned.run(at, func, swapped, {})
        if self.passing is not None:
            self.passing.after(at)
        if out.__class__ is Tensor and not self.left:
            number = (at + 1) << MAKES
            if number <= self._made:
                number = self._made + 1
            self._made = number
            numbers[id(out)] = KNOWN - number
        else:
            self.note(out)
        return out

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation, or what of it a pullback reads."""
        operation = self._at - 1
        forward = self._entries[operation].parts
        run = func if forward is None else Parts(func, self._name, forward)
        if self.pruned is None:
            out = run(*args, **kwargs)
        else:
            out = self.pruned.run(operation, run, args, kwargs)
        if self.passing is not None:
            self.passing.after(operation)
        return out

    def has(self, t: Tensor) -> bool:
        """What only a replay that is compared can tell: `had`."""
        return self.had(t)

    def saw(self, t: Tensor) -> bool:
        """Whether an operation gave ``t``, or the body was given it."""
        key = id(t)
        return key in self._numbers or key in self._external_ids or key in self.aliases

    def made(self, t: Tensor) -> None:
        """Know it by its number, and keep what left the region in its forward."""
        self._made = number = max(self._made + 1, self._at << MAKES)
        self._numbers[id(t)] = KNOWN - number
        if number in self.left:
            self.left[number] = t

    def asked(self, func: Any, t: Tensor) -> Any:
        """NOTE [answers] in `_answers`."""
        return self.answer(func, t) if by_the_user() else LEFT

    def answer(self, func: Any, t: Tensor) -> Any:
        """What the forward was told."""
        found, is_next = None, self.comes_next(func)
        if func == GRAD_FN and (not is_next or self._is_made(t)):
            return func(t)  # its own
        if is_next:
            entry = self._entries[self._at]
            found = told_again(func, t, entry, self._externals)
            self._slot = len(entry.sources)
            self._scalars += entry.scalars
        self.close(func)
        return found

    def _is_made(self, t: Tensor) -> bool:
        key = id(t)
        return key in self._numbers and key not in self._external_ids and key not in self.aliases

    def hang(self, func: Any, t: Tensor, hook: Any) -> Any:
        """Only on what it makes: the first run has hung the others."""
        if _torch.is_wrapped(t) and _torch.wrapper_level(t) > self._depth:
            return LEFT
        key, node = id(t), t.grad_fn
        if self._is_made(t):
            return LEFT
        given = key in self._external_ids or key in self.aliases
        if node is None:
            return hung_already()
        if sequence_number(node) >= self._start:  # what is given was written to, then
            return LEFT
        made = not given and leads_to(node, self._external_ids)
        return LEFT if made else hung_already()

    def swap_all(self, values: Sequence[Any]) -> list[Any]:
        """What every operation comes by: as `resolve` for each tensor, in one loop."""
        swapped = []
        at = self._at
        sources = self._entries[at].sources if at < len(self._entries) else ()
        for a in values:
            if isinstance(a, Tensor):
                if self._scalars:
                    self._scalars.append(TENSOR)
                slot = self._slot
                if slot < len(sources) and (source := sources[slot]) >= 0:
                    self._slot = slot + 1
                    a = self._externals[source]
                else:
                    a = self.resolve(a)
            elif a.__class__ in NUMBERS:
                self._scalars.append(a)
            else:
                a = self.swap(a)
            swapped.append(a)
        return swapped

    def resolve(self, t: Tensor) -> Tensor:
        """What the forward saw at this position."""
        slot = self._slot
        self._slot = slot + 1
        try:
            sources = self._entries[self._at].sources
        except IndexError:
            self._depart("it runs more operations than the forward did")
        if slot >= len(sources):
            return t  # `close` names the operation
        source = sources[slot]
        if source >= 0:
            return self._externals[source]
        if source <= KNOWN:
            found = self._numbers.get(id(t))
            if found == source:
                return t
            if found is not None:
                self._depart(
                    f"operation {self._at} ({describe(self._entries[self._at].func)}) reads "
                    "another one of the tensors that the region makes than it read in the forward"
                )
        elif source <= REWRAPPED:
            return rewrap(t, self._depth, self._externals[REWRAPPED - source])
        if id(t) in self._external_ids:
            self._depart(
                f"operation {self._at} ({describe(self._entries[self._at].func)}) reads an input "
                "where the forward read a result of the region"
            )
        node = t.grad_fn
        if (
            node is not None
            and _torch.sequence_number(node) < self._start
            and _torch.current_graph_task_id() == self._engine
            and not leads_to(node, self._external_ids)  # another thread numbers nodes itself
        ):
            self._depart(
                f"operation {self._at} ({describe(self._entries[self._at].func)}) reads a tensor "
                "from outside where the forward read a result of the region"
            )
        return t

    def close(self, func: Any) -> None:
        """Compare the operation with the record."""
        at = self._at
        try:
            entry = self._entries[at]
        except IndexError:
            self._depart(f"it runs {describe(func)} after the forward had ended")
        if entry.func is not func and entry.func != func:
            self._depart(f"operation {at} was {describe(entry.func)} and is {describe(func)}")
        if self._slot != len(entry.sources):
            self._depart(
                f"operation {at} ({describe(func)}) had {len(entry.sources)} tensor arguments and "
                f"has {self._slot}"
            )
        scalars = self._scalars
        if (scalars or entry.scalars) and not same(entry.scalars, scalars):
            if func is nested_run:
                self._depart(
                    f"operation {at}, a region inside it, runs other operations than it ran, or "
                    "with other numbers"
                )
            if func is custom_state:
                self._depart(_kept_otherwise(at, entry.scalars, scalars))
            if any(type(x) is AllHeld for x in (*entry.scalars, *scalars)):
                self._depart(
                    f"operation {at} ({describe(func)}) is given a function that holds other "
                    f"values than in the forward, {[*scalars]} for {[*entry.scalars]}"
                )
            if func is nested_values:
                self._depart(f"operation {at}, a region inside it, gives other values than it gave")
            self._depart(
                f"operation {at} ({describe(func)}) was called with {list(entry.scalars)} and is "
                f"called with {self._scalars}"
            )
        self._at = at + 1
        self._slot = 0
        if scalars:
            self._scalars = []

    def comes_next(self, func: Any) -> bool:
        """Whether the forward ran this operation here."""
        return self._at < len(self._entries) and bool(self._entries[self._at].func == func)

    def complete(self) -> None:
        """The body returned: everything that ran forward must have run."""
        if self._at != len(self._entries):
            self._depart(
                f"it ended after {self._at} operations, where the forward went on with "
                f"{describe(self._entries[self._at].func)}",
                ended=True,
            )
        if any(n >= 0 and t is None for n, t in self.left.items()):
            self._depart("it does not leave behind what the forward left", ended=True)

    def _depart(self, how: str, *, ended: bool = False, **more: str) -> NoReturn:
        place = None if ended else where()
        more.setdefault("why", f"{WHY}{iterators_and_caches(self._entries)}")
        raise departed(self._name, how, self._at, self._entries, place, self.ran(), **more)

    def ran(self) -> Sequence[Entry] | None:
        """What the replay ran, the operation under way included, if that is recorded."""
        return None


def _kept_otherwise(at: int, before: Sequence[Any], now: Sequence[Any]) -> str:
    kept = [dict(zip(scalars[::2], scalars[1::2])) for scalars in (before, now)]
    names = [n for n in kept[0] | kept[1] if kept[0].get(n, n) != kept[1].get(n, n)] or [*kept[0]]
    return (
        f"operation {at}, a custom Function, keeps other numbers for its backward than it kept, in "
        f"{', '.join(f'ctx.{n}' for n in names)} (what the backward does not compute with can have "
        "a name that begins with an underscore: it is not compared)"
    )


BY_SIGHT: list[Any] = []


def by_sight_replay(tracker: Any) -> Any:
    """Register the tracker of replays that are no repetitions."""
    BY_SIGHT.append(tracker)
    return tracker
