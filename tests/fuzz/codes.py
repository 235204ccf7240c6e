"""Pullbacks that run without a replay, counted: ``NOTE [known pullbacks]`` of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from functx._remat._known_pullbacks import Known


@contextmanager
def counted_codes() -> Iterator[list[Any]]:
    """Those of the pullbacks that run without a replay."""
    found: list[Any] = []
    call = Known.__call__

    def counted(known: Known, *of: Any) -> Any:
        found.append(known)
        return call(known, *of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Known, "__call__", counted)
        yield found
