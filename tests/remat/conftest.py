"""Fixtures of the tests of regions."""

import pytest

from .programs import Speed


@pytest.fixture(params=["recorded", "followed"])
def speed(request):
    """Run the test twice: what it is about happens in a first run, and in one that follows it."""
    return Speed(request.param)
