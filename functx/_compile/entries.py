"""The memory of a jitted function: its programs, and the calls that have run them.

A *program* serves all calls whose arguments and state are equal by value. An *entry* is one such
call. It holds for another call if the arguments are alike and every guarded place still has the
same object. That check takes microseconds. If no entry holds, a search compares the state by value
to find a program, and makes a new entry for it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._compile.guards import Guards
from functx._compile.program import Program
from functx._compile.running import Ran
from functx._compile.search import PLAIN, Search
from functx._compile.surroundings import alike, base_of, described
from functx._remat import is_tracked
from functx._torch import compiler, level_of

_MOST, _MOST_OF_ONE = 16, 4  # entries of one function, and of one program


class Programs(dict[Any, list[Any]]):
    """The known programs, by arguments and surroundings."""


class Traces(list[Any]):
    """The key and the program of each trace, in their order."""


class Entries(list[Any]):
    """The entries of a function, most recently used first."""

    def put(self, entry: Entry) -> None:
        """Add an entry, and drop the least recently used one if there are too many."""
        same = [e for e in self if e.program is entry.program]
        if len(same) == _MOST_OF_ONE:
            self.remove(same[-1])
        self.insert(0, entry)
        del self[_MOST:]

    def drop(self, entry: Entry) -> None:
        """Remove an entry if it is there."""
        with suppress(ValueError):
            self.remove(entry)


@dataclass
class Known:
    """A program, the state for which it is valid, and the objects that it returns."""

    program: Program
    ran: Ran | None  # the code whose names the search follows; ``None`` for all code
    key: Any  # the state by value; see `state_key`
    held: Any  # the objects whose ids are in the key: they must stay alive
    returned: Sequence[Any] = ()  # objects in reach that the function returns
    read: Sequence[int] = ()  # the numbers of the slots whose tensors are inputs of the program

    def returns(self, found: Search) -> bool:
        """Whether the objects that the program returns are in reach."""
        ids = {*map(id, found.held)} if self.returned else ()
        return all(id(x) in ids for x in self.returned)


def state_key(found: Search, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The whole state by value, and which of its tensors are also arguments."""
    kinds = tuple([(*described(base_of(t), True), is_tracked(t)) for t in found.tensors])
    return found.key, kinds, alike([*tensors, *found.tensors])


class Entry:
    """One call of a program, with the checks that another call must pass to reuse it."""

    def __init__(
        self,
        known: Known,
        found: Search,
        tensors: Sequence[Tensor],
        how: Any,
        settings: Any,
        forget: Callable[[Entry], None],
    ) -> None:
        program = known.program
        self.known, self.program, self._settings = known, program, settings
        self._spec, others = how
        self._n, self.depth = len(tensors), _torch.functorch_depth()
        reference: Any = weakref.ref(self, None)

        def dead(_: Any) -> None:
            if (entry := reference()) is not None:
                forget(entry)

        self._others = [None if o is None else _same_as(o[0], dead) for o in others]
        self._has_others = any(self._others)
        self._attributes = [{**t.__dict__} for t in tensors]
        self._has_attributes = any(self._attributes)
        weakly = {id(o[0]) for o in others if o is not None}
        self._guards = Guards(found, weakly)
        every = [*tensors, *found.tensors]
        self._pick: Any = None
        if known.read != [*range(len(found.tensors))]:
            self._pick = functools.partial(_picked, known.read)
        # torch's own guards accept only strided tensors of the base level, each of them once. The
        # rest is compared in Python.
        first = alike(every)
        self._alike = None if first == (*range(len(every)),) else first
        plain = [
            i
            for i, t in enumerate(every)
            if first[i] == i and t.layout is torch.strided and level_of(t) <= 0
        ]
        self._all_plain = len(plain) == len(every)
        self._plain, chosen = plain, set(plain)
        self._rest = [i for i in range(len(every)) if i not in chosen]
        self._sized = [not program.dynamic or i >= len(tensors) for i in range(len(every))]
        self._kinds = self._described(every)
        self._tensor_guards = None
        if plain:
            sizes = [
                [*every[i].shape] if self._sized[i] else [None] * every[i].dim() for i in plain
            ]
            strides = [
                [*every[i].stride()] if self._sized[i] else [None] * every[i].dim() for i in plain
            ]
            self._tensor_guards = compiler.TensorGuards(
                *(every[i] for i in plain),
                dynamic_dims_sizes=sizes,
                dynamic_dims_strides=strides,
            )
        # Inputs with pending conjugation or negation, or in a wrapper of a level that has ended:
        given = [*tensors, *(found.tensors[i] for i in known.read)]
        self.lazy = [
            i
            for i, t in enumerate(given)
            if t.is_conj() or t.is_neg() or _torch.unwrap_if_dead(t) is not t
        ]
        self._asks = program.asked_leafness or program.asked_offset or program.dynamic
        self._asks = self._asks or program.asked_gradients
        self._asks = self._asks or bool(program.asked)

    def state(self, settings: Any, spec: Any, others: Any, tensors: Any) -> Any:
        """The tensors of the state if this entry holds for a call; else ``None``."""
        if settings != self._settings or len(tensors) != self._n:
            return None
        if spec is not self._spec and spec != self._spec:
            return None
        if self._has_others or len(others) != self._n:
            for other, is_same in zip(others, self._others):
                if other is None or is_same is None:
                    if other is not is_same:
                        return None
                elif not is_same(other[0]):
                    return None
        has_attributes = self._has_attributes or any(map(_attributes_of, tensors))
        if has_attributes and not _are_same(self._attributes, tensors):
            return None
        state = self._guards.read()
        if state is None or self.depth != _torch.functorch_depth():
            return None
        if self._all_plain:
            guards = self._tensor_guards
            if guards is not None and not guards.check(*tensors, *state):
                return None
        elif not self._hold_for([*tensors, *state]):
            return None
        if self._pick is not None:
            state = self._pick(state)
        if self._asks and not self.program.fits(tensors, state):
            return None
        return state

    def is_intact(self, state: Sequence[Tensor]) -> bool:
        """Whether all guards still hold, and ``state`` still has the tensors of the state."""
        found = self._guards.read()
        if found is None:
            return False
        found = found if self._pick is None else self._pick(found)
        return [*map(id, found)] == [*map(id, state)]

    def _hold_for(self, every: Sequence[Tensor]) -> bool:
        if alike(every) != (self._alike or (*range(len(every)),)):
            return False
        guards = self._tensor_guards
        if guards is not None and not guards.check(*[every[i] for i in self._plain]):
            return False
        return self._described(every) == self._kinds

    def _described(self, every: Sequence[Tensor]) -> list[Any]:
        return [
            (
                level_of(every[i]),
                *described(base_of(every[i]), self._sized[i]),
                is_tracked(every[i]),
            )
            for i in self._rest
        ]


_attributes_of: Any = operator.attrgetter("__dict__")


def _are_same(expected: Sequence[dict[str, Any]], tensors: Sequence[Tensor]) -> bool:
    """Whether tensors have exactly the expected attributes from user code."""
    for before, now in zip(expected, map(_attributes_of, tensors)):
        if before.keys() != now.keys() or any(now[k] is not v for k, v in before.items()):
            return False
    return True


def _picked(numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[i] for i in numbers]


def _same_as(value: Any, dead: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """A check whether an argument is ``value``.

    Objects are compared by weak reference, so that an entry does not keep them alive. When the
    object dies, ``dead`` drops the entry.
    """
    kind = type(value)
    if kind in PLAIN:
        return functools.partial(_is_equal, value, kind)
    try:
        return functools.partial(_is_object, weakref.ref(value, dead))
    except TypeError:  # its class allows no weak references
        return lambda x: x is value


def _is_equal(value: Any, kind: Any, x: Any) -> bool:
    if x is value:
        return True
    if type(x) is not kind or x != value:
        return False
    return kind not in (float, complex) or repr(x) == repr(value)


def _is_object(reference: Any, x: Any) -> bool:
    return reference() is x
