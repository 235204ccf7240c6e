"""What is rarely within reach of a region, and is put back in ways of its own, or can't be."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

from functx._remat._advanced import Advanced, moves
from functx._remat._code_names import BY_ANY_NAME
from functx._remat._large_arrays import LargeArrays
from functx._remat._per_thread import PerThread, Runner
from functx._remat._python_random import is_array
from functx._remat._reached import Reached
from functx._remat._really_held import own_dict


class Rare:
    """What each thread has its own of, and what runs take from.

    Args:
        found: what a function can reach.

    Attributes:
        advanced: the latter.
    """

    __slots__ = ("_arrays", "_per_thread", "advanced")

    def __init__(self, found: Reached) -> None:
        self._per_thread = PerThread(found)
        self._arrays = LargeArrays([x for x in found.rare if is_array(x)])
        moving = [x for x in found.rare if moves(type(x))]
        unnamed = _held_unnamed(found) if moving else frozenset()
        self.advanced = Advanced([x for x in moving if id(x) not in unnamed])

    def seal(self, written: set[int]) -> None:
        """The first run ended.

        Args:
            written: ids of tensors that were written to in place.
        """
        self._per_thread.seal(written)
        self.advanced.seal()
        self._arrays.seal()

    def differs(self) -> bool:
        """Whether anything is not as the first run found it, or a run makes it so."""
        return self.advanced.any() or self._arrays.any() or self._per_thread.differs()

    @contextmanager
    def restored(self, region: str) -> Iterator[Runner | None]:
        """As the first run found it; gives what runs the body, if it can't be just called.

        Args:
            region: its name.
        """
        with (
            self._arrays.restored(region),
            self.advanced.restored(region),
            self._per_thread.restored(region) as run,
        ):
            there = self.advanced.there
            if not there:
                yield run
                return

            def with_others(body: Any, *tensors: Any) -> Any:
                if hasattr(body, "with_others"):
                    body, tensors = body.with_others, (there, *tensors)
                return body(*tensors) if run is None else run(body, *tensors)

            yield with_others


def _held_unnamed(found: Reached) -> Set[int]:
    """Ids of what objects hold in attributes that no code of the region names, and there alone."""
    names = found.names()
    if not BY_ANY_NAME.isdisjoint(names):
        return frozenset()
    named: set[int] = set()
    unnamed: set[int] = set()
    for one in (*found.objects, *found.modules):
        for name, x in [*own_dict(one).items()]:
            if moves(type(x)):
                (named if name in names else unnamed).add(id(x))
    return unnamed - named
