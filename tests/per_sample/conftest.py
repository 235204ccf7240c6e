import pytest
import torch

from functx.per_sample import _pull


@pytest.fixture
def made(monkeypatch):
    """What arrived: for each gradient whether it was known by factors."""
    seen = []
    factored = _pull._factored

    def look(rows):
        found = factored(rows)
        seen.append(not isinstance(found, torch.Tensor))
        return found

    monkeypatch.setattr(_pull, "_factored", look)
    return seen
