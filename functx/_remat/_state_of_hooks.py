"""What hooks of a forward find in what they reach, and what those of a replay are to find.

What nobody else holds is not kept: only which numbers were there, and what hooks have put there
since. `_bound` says what is made of it.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

from functx import _torch
from functx._remat._contents_by_place import (
    Contents,
    alike,
    contents,
    fill,
    is_compared,
    is_memory,
    is_number,
)


class Same:
    """Stands for what was at some place before."""

    __slots__ = ("place",)

    def __init__(self, place: Any) -> None:
        self.place = place


class FoundTensor:
    """A tensor that hooks of a forward have found: nobody may write to it since.

    Args:
        of: the tensor, when the body has returned.
    """

    def __init__(self, of: Tensor) -> None:
        self._of = weakref.ref(of)
        self._version = _version(of)
        self._written = False

    def __str__(self) -> str:
        return "tensor"

    def leave(self, *, others: bool) -> None:
        """It is held weakly."""

    def is_it(self, x: Any) -> bool:
        """Whether that is the very thing."""
        return x is not None and x is self._of()

    def now(self) -> Contents:
        """It is what it was, or an error."""
        return {}

    def give(self, to: Any, now: Contents, *, others: bool) -> Written | None:
        """What tells whether hooks of a replay write to what they reach; ``None`` if some have."""
        of = self._of()
        if to is of or not isinstance(to, Tensor):
            return NOTHING_GIVEN
        if self._written or (of is not None and _version(of) != self._version):
            return None
        return Written(self, to)

    def put(self) -> bool:
        """Hooks of a replay have written to theirs; whether nobody finds that this is as it was."""
        self._written = True
        return self._of() is None


class Written:
    """Tells of a tensor of a replay whether its hooks write to it."""

    def __init__(self, found: FoundTensor | None, to: Any) -> None:
        self._found, self._to, self._version = found, to, 0 if to is None else _version(to)

    def lend(self, *, later: bool) -> None:
        """A hook is about to be called."""

    def put_back(self, *, for_all: bool, only_numbers: bool) -> bool:
        """A hook was called; whether it has left the tensor as it was, or nobody finds that."""
        if self._found is None or not for_all or _version(self._to) == self._version:
            return True
        return self._found.put()


NOTHING_GIVEN = Written(None, None)


def _version(t: Tensor) -> int:
    with suppress(RuntimeError):
        return _torch.version(t)
    return 0


class Found:
    """What hooks of a forward have found, and find, in something that they reach.

    Args:
        of: that, when the body has returned.
    """

    def __init__(self, of: Any) -> None:
        self._of: Any = of
        self._kind = type(of)
        # Of memory, which is compared where it is read, only what is there later counts.
        self._was: Mapping[Any, Any] = {"": None} if is_memory(of) else contents(of)
        self._by_place = all(map(is_number, self._was))
        self._now: Contents = {}
        self._put = False

    def __str__(self) -> str:
        return "variable" if self._kind is types.CellType else self._kind.__name__

    def leave(self, *, others: bool) -> None:
        """Hold it, and what it held, only where others do so, too."""
        if others:
            self._was = {key: _weakly(x) for key, x in self._was.items()}
            return
        if self._by_place:
            memory = is_memory(self._of)
            self._now = {
                k: x if self._is_given(x) and not memory else Same(k) for k, x in self._was.items()
            }
        self._of, self._was = None, {}

    def _is_given(self, x: Any) -> bool:
        return is_number(x) if self._kind is types.CellType else is_compared(x)

    def is_it(self, x: Any) -> bool:
        """Whether that is the very thing."""
        return x is not None and x is self._of

    def now(self) -> Contents:
        """What hooks find there: each is a number, has been put there since, or is the `Same`."""
        if self._of is None:
            return self._now
        was = {id(x): key for key, ref in self._was.items() if (x := ref()) is not None}
        return {
            key: Same(was[id(x)]) if id(x) in was and not self._is_given(x) else x
            for key, x in contents(self._of).items()
        }

    def here(self) -> Contents:
        """What it holds, if that is known."""
        return {} if self._of is None else contents(self._of)

    def _is_what_it_was(self) -> bool:
        if self._of is None:
            return not self._put
        was = {key: ref() for key, ref in self._was.items()}
        return alike(contents(self._of), was)

    def give(self, to: Any, now: Contents, *, others: bool) -> Given | Written | None:
        """Let hooks of a replay find that in what they reach; ``None`` if that can't be.

        Args:
            to: what they reach.
            now: as `now` has said.
            others: whether that may be the program's: it is so for calls of hooks alone.
        """
        if to is self._of or type(to) is not self._kind:
            return NOTHING_GIVEN
        own = contents(to)
        those = [x.place for x in now.values() if isinstance(x, Same)]
        known = self._by_place or self._of is not None
        if not (known and all(is_number(place) and place in own for place in those)):
            if not self._is_what_it_was():
                return None
            return NOTHING_GIVEN if self._by_place else Given(self, to, own, own, {}, {})
        new = {k: own[x.place] if isinstance(x, Same) else x for k, x in now.items()}
        given = Given(self, to, own, new, now, self.here())
        if not alike(own, new):
            given.lent = others
            if not others:
                fill(to, new)
        return given

    def put(self, given: Given, left: Contents, *, only_numbers: bool) -> bool:
        """Hooks of a replay have left that there; whether it could be put here.

        Args:
            given: what they were given.
            left: what is there now.
            only_numbers: nothing else, if nobody else has it.
        """
        self._put = True
        theirs = {id(key) for key in given.own if not is_number(key)}
        if not self._by_place or any(id(key) in theirs for key in left):
            return self._of is None
        places = {id(x): key for key, x in given.new.items() if not is_number(x)}
        here = given.now if self._of is None else given.mine
        mine = {k: here.get(places.get(id(x), _NOWHERE), x) for k, x in left.items()}
        if self._of is not None:
            fill(self._of, mine)
            return True
        if only_numbers:
            new = {k for k, x in left.items() if id(x) not in places and not is_number(x)}
            mine = {k: here.get(k, None) if k in new else x for k, x in mine.items()}
        self._now = mine
        return True


_NOWHERE = object()


class Given:
    """What hooks of a replay were given, of what one of the forward finds.

    Args:
        found: that.
        to: what they reach.
        own: what was there.
        new: what is there for them.
        now: what it is made of.
        mine: what hooks of the forward found meanwhile.

    Attributes:
        lent: whether it is there while a hook is called, and no longer.
    """

    lent = False
    _borrowers = 0

    def __init__(
        self,
        found: Found,
        to: Any,
        own: Contents,
        new: Contents,
        now: Contents,
        mine: Contents,
    ) -> None:
        # A context holds what is saved, and this may be held by it.
        self._to = weakref.ref(to) if isinstance(to, FunctionCtx) else lambda: to
        self._found = found
        self.own, self.new, self.now, self.mine = own, new, now, mine

    def lend(self, *, later: bool) -> None:
        """A hook is about to be called.

        Args:
            later: than by what the replay runs again: numbers are what they are by now.
        """
        self._borrowers += 1
        if self.lent and self._borrowers == 1:
            fill(self._to(), self.new)
        if later:
            now, here = self._found.now(), contents(self._to())
            those = here.keys() & now.keys()
            numbers = {k: now[k] for k in those if is_number(now[k]) and is_number(here[k])}
            new = {k: numbers.get(k, x) for k, x in here.items()}
            if not alike(here, new):
                fill(self._to(), new)
            self.new, self.now, self.mine = new, now, self._found.here()

    def put_back(self, *, for_all: bool, only_numbers: bool) -> bool:
        """A hook was called: what it has left there is so for all runs; whether that can be.

        Args:
            for_all: whether it is to be so.
            only_numbers: nothing else, if nobody else has what hooks of the forward reach.
        """
        left = contents(self._to())
        self._borrowers -= 1
        if self.lent and not self._borrowers:
            fill(self._to(), self.own)
        if not for_all or alike(left, self.new):
            return True
        could = self._found.put(self, left, only_numbers=only_numbers)
        if self.lent:
            self.new = left  # another hook may share it
        return could

    def __str__(self) -> str:
        return str(self._found)


def _weakly(x: Any) -> Callable[[], Any]:
    with suppress(TypeError):
        return weakref.ref(x)
    return lambda: x
