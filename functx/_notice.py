"""A line on stderr for work that takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def of_long_work(text: str) -> Iterator[None]:
    """Say on stderr what is being done, if it takes more than two seconds."""
    timer = threading.Timer(2.0, sys.stderr.write, [f"{text} ...\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
