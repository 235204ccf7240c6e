"""What hooks of a forward find in what they reach, and what those of a replay are to find.

What nobody else holds is not kept: only which numbers were there, and what hooks have put there
since. `_bound` says what is made of it.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from functx import _torch
from functx._remat._contents_by_place import (
    PLAIN,
    Contents,
    alike,
    contents,
    fill,
    held,
    is_compared,
    is_memory,
    is_number,
    is_place,
    is_taken_from,
    weakly,
)


class _Told(threading.local):
    # What a replay was given and hooks of it have changed, where that is so for all runs; if asked.
    changed: list[Any] | None = None


told = _Told()


class Same:
    """Stands for what was at some place before."""

    __slots__ = ("place",)

    def __init__(self, place: Any) -> None:
        self.place = place


class FoundTensor:
    """A tensor that hooks of a forward have found. It is held weakly, till one has written to it.

    Args:
        of: the tensor, when the body has returned.
    """

    is_outer = False

    def __init__(self, of: Tensor) -> None:
        self._of = weakref.ref(of)
        self._version = _version(of)
        self._value: Tensor | None = None
        self._lost = False

    def __str__(self) -> str:
        return "tensor"

    def leave(self, *, others: bool) -> None:
        """It is held weakly."""

    def id_of_it(self) -> int:
        """The id of that, if it is there."""
        return id(self._of())

    def now(self) -> Contents:
        """What it is, if it was written to."""
        of = self._of()
        if of is not None and _version(of) != self._version:
            return {"": _copied(of)}
        return {} if self._value is None else {"": self._value}

    def give(self, to: Any, now: Contents, *, others: bool) -> Written | None:
        """Let hooks of a replay find that in what they reach; ``None`` if that can't be.

        Args:
            to: what they reach.
            now: as `now` has said.
            others: whether that may be the program's.
        """
        if to is self._of() or not isinstance(to, Tensor):
            return NOTHING_GIVEN
        if self._lost or (now and (others or not _write(to, now[""]))):
            return None
        return Written(self, to)

    def put(self, left: Tensor) -> bool:
        """Hooks of a replay have written that; whether all find it."""
        of = self._of()
        if not _is_constant(left):
            self._lost = True
            return of is None
        self._value = _copied(left)
        if of is not None:
            if not _write(of, left):
                return False
            self._version = _version(of)
        return True


class Written:
    """Tells of a tensor of a replay whether its hooks write to it."""

    def __init__(self, found: FoundTensor | None, to: Any) -> None:
        self._found, self._to, self._version = found, to, 0 if to is None else _version(to)

    def lend(self, *, later: bool) -> None:
        """A hook is about to be called.

        Args:
            later: than by what the replay runs again: the tensor is what it is by now.
        """
        if self._found is not None and later and (now := self._found.now()):
            _write(self._to, now[""])
            self._version = _version(self._to)

    def put_back(self, *, for_all: bool, only_constants: bool) -> bool:
        """A hook was called: what it has written is there for all runs; whether that can be.

        Args:
            for_all: whether it is to be so.
            only_constants: has no bearing on what is written to: it is one, or an error.
        """
        if self._found is None or not for_all or _version(self._to) == self._version:
            return True
        self._version = _version(self._to)
        return self._found.put(self._to)


def _copied(t: Tensor) -> Tensor:
    with torch.no_grad(), _torch.without_modes():
        return t.detach().clone()


def _write(to: Tensor, value: Tensor) -> bool:
    """Write that to a tensor of which no derivative can be taken; whether it is one."""
    if not _is_constant(to) or to.is_inference() or to.shape != value.shape:
        return False
    with torch.no_grad(), _torch.without_modes():
        to.copy_(value)
    return True


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

    is_outer = False  # a variable that the function of the region closes over

    def __init__(self, of: Any) -> None:
        self._of: Any = of
        self._kind = type(of)
        # Of memory, which is compared where it is read, only what is there later counts.
        self._was: Mapping[Any, Any] = contents(of)
        if is_memory(of):
            self._was = dict.fromkeys(self._was)
        self._by_place = all(map(is_place, self._was))
        self._now: Contents = {}
        self._put = False

    def __str__(self) -> str:
        return "variable" if self._kind is types.CellType else self._kind.__name__

    def leave(self, *, others: bool) -> None:
        """Hold it, and what it held, only where others do so, too."""
        if others:
            if not PLAIN.issuperset(map(type, self._was.values())):
                self._was = {key: weakly(x) for key, x in self._was.items()}
            return
        if self._by_place:
            memory = is_memory(self._of)
            self._now = {
                k: x if self._is_given(x) and not memory else Same(k) for k, x in self._was.items()
            }
        self._of, self._was = None, {}

    def _is_given(self, x: Any) -> bool:
        if self._kind is types.CellType:  # a replay takes from a copy, and a hook from the very one
            return is_number(x) or (self.is_outer and is_taken_from(x))
        return is_compared(x)

    def id_of_it(self) -> int:
        """The id of that, if it is held."""
        return id(self._of)

    def now(self) -> Contents:
        """What hooks find there."""
        return self._now if self._of is None else contents(self._of)

    def _made_of(self, now: Contents) -> Contents:
        """Each is a number, has been put there since, or is the `Same`."""
        if self._of is None:
            return now
        was = {id(x): key for key, ref in self._was.items() if (x := held(ref)) is not None}
        return {
            key: Same(was[id(x)]) if id(x) in was and not self._is_given(x) else x
            for key, x in now.items()
        }

    def made_of_now(self) -> Contents:
        """What hooks find there, and what of that is the `Same`."""
        return self._made_of(self.now())

    def here(self) -> Contents:
        """What it holds, if that is known."""
        return {} if self._of is None else contents(self._of)

    def _is_what_it_was(self) -> bool:
        if self._of is None:
            return not self._put
        was = {key: held(ref) for key, ref in self._was.items()}
        return alike(contents(self._of), was)

    def give(self, to: Any, now: Contents, *, others: bool) -> Given | Written | None:
        """Let hooks of a replay find that in what they reach; ``None`` if that can't be.

        Args:
            to: what they reach.
            now: as `now` has said.
            others: whether that may be the program's, too: it is so for calls of hooks alone.
        """
        if to is self._of:
            return NOTHING_GIVEN
        now, own = self._made_of(now), contents(to)
        those = [x.place for x in now.values() if isinstance(x, Same)]
        if self._of is None:
            fits = self._by_place
        else:
            fits = all(is_place(key) or key not in self._was for key in now)
        fits = fits and _name_of_kind(type(to)) == _name_of_kind(self._kind)
        if is_memory(to):
            fits = fits and own.keys() == now.keys()
        if not (fits and all(is_place(place) and place in own for place in those)):
            if not self._is_what_it_was():
                return None
            given = Given(self, to, own, own, {}, {})
            given.fits = False
            return given
        new = {k: own[x.place] if isinstance(x, Same) else x for k, x in now.items()}
        given = Given(self, to, own, new, now, self.here())
        if not alike(own, new):
            given.lent = others
            if not others:
                fill(to, new)
        return given

    def put(self, given: Given, left: Contents, *, only_constants: bool) -> bool:
        """Hooks of a replay have left that there; whether it could be put here.

        Args:
            given: what they were given.
            left: what is there now.
            only_constants: nothing else, if nobody else has it.
        """
        self._put = True
        theirs = {id(key) for key in given.own if not is_place(key)}
        if not given.fits or any(id(key) in theirs for key in left):
            return self._of is None
        places = {id(x): key for key, x in given.new.items() if not is_number(x)}
        here = given.now if self._of is None else given.mine
        mine = {k: here.get(places.get(id(x), _NOWHERE), x) for k, x in left.items()}
        if self._of is not None:
            fill(self._of, mine)
            return True
        if only_constants:
            new = {k for k, x in left.items() if id(x) not in places and not _is_constant(x)}
            mine = {
                k: here[k] if k in new else x for k, x in mine.items() if k in here or k not in new
            }
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
        fits: whether what is left in the one can be put in the other.
    """

    fits = True
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
            later: than by what the replay runs again: what no derivative can be taken of is
                what it is by now.
        """
        self._borrowers += 1
        if (to := self._to()) is None:
            return
        if self.lent and self._borrowers == 1:
            fill(to, self.new)
        if later and self.fits:
            now, here = self._found.made_of_now(), contents(to)
            those = here.keys() & now.keys()
            those = {k for k in those if _is_constant(now[k]) and _is_constant(here[k])}
            new = {k: now[k] if k in those else x for k, x in here.items()}
            if not alike(here, new):
                fill(to, new)
            self.new, self.now, self.mine = new, now, self._found.here()

    def put_back(self, *, for_all: bool, only_constants: bool) -> bool:
        """A hook was called: what it has left there is so for all runs; whether that can be.

        Args:
            for_all: whether it is to be so.
            only_constants: nothing else, if nobody else has what hooks of the forward reach.
        """
        self._borrowers -= 1
        if (to := self._to()) is None:  # the context is gone with its tape
            return True
        left = contents(to)
        if self.lent and not self._borrowers:
            fill(to, self.own)
        if not for_all or alike(left, self.new):
            return True
        could = self._found.put(self, left, only_constants=only_constants)
        if could and told.changed is not None:
            told.changed.append(to)
        if self.lent:
            self.new = left  # another hook may share it
        return could

    def __str__(self) -> str:
        return str(self._found)


def _name_of_kind(kind: type) -> Any:
    """A class may be made anew by each run; those of contexts are."""
    return FunctionCtx if issubclass(kind, FunctionCtx) else (kind.__module__, kind.__qualname__)


def _is_constant(x: Any) -> bool:
    """Whether no derivative can be taken of that."""
    if isinstance(x, Tensor):
        return not (x.requires_grad or _torch.is_wrapped(x))
    return is_number(x)
