"""Code that is known from one place recomputes as little at another as code that is new."""

import pytest
import torch
from cases import numbers
from references import count

import functx
from functx._remat import _known_runs

pytestmark = pytest.mark.usefixtures("hooks")

X = numbers(3, 4)


def f(x):
    return torch.sin(torch.sin(x))


def backward(f):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)


WAYS = {
    "autograd": backward,
    "grad": lambda f: functx.grad(lambda x: f(x).sum())(X),
    "vmap(grad)": lambda f: functx.vmap(functx.grad(lambda x: f(x).sum()))(X),
    "grad(grad)": lambda f: functx.grad(lambda x: functx.grad(lambda x: f(x).sum())(x).sum())(X),
}


@pytest.mark.parametrize("after", WAYS)
@pytest.mark.parametrize("before", WAYS)
def test_counts(before, after, monkeypatch):
    monkeypatch.setattr(_known_runs, "_sightings", {})
    expected = count(lambda: WAYS[after](functx.remat(f)))
    for _ in range(_known_runs.ALIKE + 2):
        WAYS[before](functx.remat(f))
    for _ in range(2):
        assert count(lambda: WAYS[after](functx.remat(f))) == expected


def test_settings(monkeypatch):
    """A run that differs in what is known beforehand has a ledger, and is replayed as little."""
    monkeypatch.setattr(_known_runs, "_sightings", {})
    for _ in range(_known_runs.ALIKE + 2):
        backward(functx.remat(f))
    x = X.clone().requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        out = functx.remat(f)(x)
        assert count(lambda: torch.autograd.grad(out.sum(), x))["sin"] == 1
    finally:
        torch.use_deterministic_algorithms(False)
