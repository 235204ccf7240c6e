"""The private names of torch that ``compat`` relies on exist."""

import pytest

from functx.compat import _torch


@pytest.mark.parametrize("name", _torch.__all__)
def test_a_private_name_of_torch_exists(name):
    assert getattr(_torch, name) is not None
