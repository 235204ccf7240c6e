"""Memory that runs out at any operation at all: the chunk is halved, and the result is right."""

import gc
import warnings

import pytest
import torch
from cases import numbers
from references import assert_same
from torch.utils._python_dispatch import TorchDispatchMode

from functx import per_sample

from .losses import slow, slow_norms, slow_sum

B, STEP = 7, 7
PARAMS = [numbers(20, 70, start=0.5) / 7, numbers(3, start=2.0), numbers(70, 30, start=1.0) / 7]
X = numbers(B, 20)


def loss(p, x):
    h = torch.tanh(x @ p[0])  # known by factors; then a gradient that is not, and a small one
    return ((h * p[0][0]) @ p[2]).sin().sum() + (x[:3] * p[1]).square().sum()


class RunsOut(TorchDispatchMode):
    """At one operation, counted from 1, memory runs out."""

    def __init__(self, at):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


GRADIENTS = slow(loss, PARAMS, X)
NORMS = slow_norms(GRADIENTS)
LIMIT = NORMS.mean().item()
SUM = slow_sum(GRADIENTS, (LIMIT / NORMS).clamp(max=1))


def clipped(passes):
    return lambda: per_sample.clipped_sum(
        loss, max_norm=LIMIT, passes=passes, chunk_size=4, return_norms=True
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (clipped(1), (SUM, (None, NORMS, None))),
        (clipped(2), (SUM, (None, NORMS, None))),
        (lambda: per_sample.norms(loss, chunk_size=4), NORMS),
        (
            lambda: per_sample.grads(loss, chunk_size=4, return_norms=True),
            ([torch.stack(leaf) for leaf in zip(*GRADIENTS)], (None, NORMS, None)),
        ),
    ],
    ids=["clipped_sum", "clipped_sum, passes=2", "norms", "grads"],
)
def test_at_any_operation_the_chunk_is_halved(make, expected, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # it takes longer than all else here
    with torch.no_grad(), RunsOut(0) as counter:
        make()(PARAMS, X)
    survived = 0
    for at in range(1, counter.count + 1, STEP):
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught, RunsOut(at):
            warnings.simplefilter("always")
            try:
                found = make()(PARAMS, X)
            except torch.OutOfMemoryError:  # around the chunks, where nothing can be halved
                continue
        assert any("out of memory with" in str(w.message) for w in caught)
        total, *extras = found if isinstance(found, tuple) else (found,)
        total = list(total) if isinstance(total, (list, tuple)) else total
        assert_same((total, *map(tuple, extras)), _flat(expected), eps=1024)
        survived += 1
    assert survived > 0.9 * counter.count / STEP - 3


def _flat(expected):
    return expected if isinstance(expected, tuple) else (expected,)
