"""Shared fixtures: fixed seeds, and memory that nobody computed is NaN."""

import contextlib
import gc
import sys

import pytest
import torch

from functx import _torch
from functx._remat import ledger


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _unwritten_memory_shows():
    """What a replay hands out in place of what it leaves out, and reads by mistake, is NaN."""
    real = ledger.unwritten

    def nan(layout):
        out = real(layout)
        if isinstance(out, torch.Tensor) and not _torch.tracing():
            out.untyped_storage().fill_(255)  # of floating point numbers the bytes of a NaN
        return out

    ledger.unwritten = nan
    yield
    ledger.unwritten = real


@pytest.fixture(params=["hooks allowed", "hooks disabled"])
def hooks(request):
    """Run the test twice: as it is, and where any saved-tensor hook raises."""
    with contextlib.ExitStack() as stack:
        if request.param == "hooks disabled":
            message = "functx uses no hooks"
            stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(message))
        yield


_looked_at = None


def pytest_runtest_setup(item):
    """Take what imports and earlier files have left out of garbage collections.

    Each measured peak, and each search for what a region still holds, collects garbage first, which
    would look at a million objects of torch and JAX: of some files that was most of their time.
    """
    global _looked_at
    now = item.path, len(sys.modules)
    if now != _looked_at:
        gc.collect()
        gc.freeze()
        _looked_at = now


@pytest.fixture
def no_hooks():
    """Run the test only where any saved-tensor hook raises: for large generated tests."""
    with torch.autograd.graph.disable_saved_tensors_hooks("functx uses no hooks"):
        yield
