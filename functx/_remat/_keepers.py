"""Custom Functions of a replay keep what those of the forward do: numbers, lists, objects.

NOTE [what functions keep]
The tape of a forward holds what custom Functions keep on their ``ctx``. Their backwards may change
that (a counter, a cache), and so may whoever else has it. The Functions of a replay keep what is
made anew. As hooks do (``NOTE [what hooks are bound to]``), they find there what those of the
forward would when the tape is pulled back, and what they leave there is so for all runs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from functx._remat._bound import Bound, Finding, Reaching, State
from functx._remat._in_parts import running


class Keeper:
    """A custom Function that a body has applied.

    Args:
        bound: what it keeps.

    Attributes:
        then: what it found in the first run, where one of the region around is run again.
    """

    then: State | None = None

    def __init__(self, bound: Bound) -> None:
        self.bound = bound


class Keeping:
    """Custom Functions of a replay, whose tape is about to be pulled back.

    They hold it, so that what is on a tape is held by that alone.

    Args:
        nodes: of them.
        reaching: what they reach.
        given: what they were given.
        recorded: whether derivatives may be taken of what the replay gives.
        again: whether it is run for that once more.
    """

    def __init__(
        self,
        nodes: Sequence[Any],
        reaching: Reaching,
        given: Sequence[Finding],
        recorded: bool,
        again: bool,
    ) -> None:
        self._reaching, self._given = reaching, given
        self._recorded, self._again = recorded, again
        for node in nodes:
            node.metadata[_KEEPING] = self
        hung.those = [*hung.those, *map(weakref.ref, nodes)]

    def found(self) -> AbstractContextManager[None]:
        """Their backwards find what they were given."""
        return self._reaching.found(self._given, recorded=self._recorded, again=self._again)


_KEEPING = "functx_keeping"


class _Hung(threading.local):
    those: Sequence[weakref.ref[Any]] = ()


hung = _Hung()


@contextmanager
def found_by_functions(nodes: Sequence[weakref.ref[Any]]) -> Iterator[None]:
    """A tape is pulled back, on which these are."""
    there = (ref() for ref in nodes)
    those = {id(k): k for node in there if node and (k := node.metadata.get(_KEEPING))}
    with ExitStack() as stack:
        for one in those.values():
            stack.enter_context(one.found())
        del those
        yield
    if running.again:  # by what is pulled back later, too
        hung.those = [*hung.those, *nodes]
