"""NumPy arrays that a region reaches, and that are too large to be copied at each call.

It may not write to them. Up to a size they have a checksum before a run and after it; of larger
ones, pages have: what writes to all of one is found, what writes to a few entries may not be. The
nearest ones, that is: what a call reads of them has a bound, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from functx._remat._advanced import NotPutBackError
from functx._remat._much_memory import bits_of_much

_ALL_OF = 1 << 22
"""So many bytes are looked at, of all of them together."""
_PAGES = 256
"""And so many pages of those that are left, together."""
_MANY = 64
"""So many arrays are."""


class LargeArrays:
    """Those within reach.

    Args:
        arrays: they, whose memory is in one piece.
    """

    __slots__ = ("_before", "_pages", "_written")

    def __init__(self, arrays: Iterable[Any]) -> None:
        looked_at: list[tuple[Any, int]] = []
        left = _ALL_OF
        for array in islice(arrays, _MANY):
            most = array.nbytes if array.nbytes <= left else 0
            left -= most
            looked_at.append((array, most))
        # Of each of these; what is no larger than so many is read.
        self._pages = _PAGES // max([most for _, most in looked_at].count(0), 1)
        self._before = [(a, most, self._bits(a, most)) for a, most in looked_at]
        self._written: tuple[int, ...] = ()

    def _bits(self, array: Any, most: int) -> int:
        return bits_of_much(array.ctypes.data, array.nbytes, most, self._pages)

    def seal(self) -> None:
        """The run ended."""
        before, self._before = self._before, []
        self._written = tuple(a.nbytes for a, most, bits in before if self._bits(a, most) != bits)

    def any(self) -> bool:
        """Whether the run has written to any."""
        return bool(self._written)

    @contextmanager
    def restored(self, region: str) -> Iterator[None]:
        """For a replay.

        Raises:
            NotPutBackError: one was written to.
        """
        if self._written:
            raise NotPutBackError(
                f"remat: the region {region!r} writes to a NumPy array of {self._written[0]:,} "
                "bytes, which is too large to be copied at each call, so a replay would not find "
                "what the forward found. Write to it outside of the region, or make it a tensor.",
                "",
            )
        yield
