"""A number that tells whether much memory has changed, found as fast as memory is read."""

from __future__ import annotations

import ctypes
import sys
import zlib

MUCH = 1 << 24
"""So many bytes are read; of what is larger, pages are."""

_PAGES = 256
PAGE, _ROW = 4096, 512


def bits_of_much(start: int, size: int, most: int = MUCH, pages: int = _PAGES) -> int:
    """A checksum of memory: of all of it, or of pages that are spread over what is larger.

    Of sums of rows and of columns: what has changed is found, and so is what has changed places.

    Args:
        start: its address.
        size: how many bytes it is.
        most: so many are read; no fewer than those pages have.
        pages: how many, two or more.
    """
    if size > max(most, pages * PAGE):
        last = size - PAGE
        places = (last * i // (pages - 1) for i in range(pages))
        return hash((*(ctypes.string_at(start + i, PAGE) for i in places),))
    words, rest = size // 8, size % 8
    end = ctypes.string_at(start + size - rest, rest)
    memory = (ctypes.c_char * (words * 8)).from_address(start)
    if (numpy := sys.modules.get("numpy")) is None:
        return hash((zlib.crc32(memory), end))
    rows = words // _ROW
    flat = numpy.frombuffer(memory, numpy.int64)
    table, beside = flat[: rows * _ROW].reshape(rows, _ROW), flat[rows * _ROW :]
    return hash((table.sum(0).tobytes(), table.sum(1).tobytes(), beside.tobytes(), end))
