"""Which part of a grid runs in `make test`."""

from collections.abc import Collection, Iterable

import pytest


def swept_but(quick: Collection[str], names: Iterable[str]) -> list:
    """All names as parameters; those that are not ``quick`` run in `make sweep`."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.sweep) for name in names
    ]
