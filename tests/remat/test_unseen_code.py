"""Kernels of C++ extensions read and write unseen: replays run all that they may read."""

import pytest
import torch
from cases import numbers
from torch.utils._python_dispatch import _disable_current_modes

import functx
from functx._remat import ledger

RUNS = 2  # the second one may follow a plan
MAKERS = {
    "empty": torch.empty_like,
    "zeros": torch.zeros_like,
    "of a shape": lambda x: x.new_zeros(x.shape),
}


@pytest.fixture(autouse=True)
def _what_is_left_out_is_no_number(monkeypatch):
    unwritten = ledger.unwritten
    nan = lambda t: t.fill_(torch.nan if t.is_floating_point() else 1)
    monkeypatch.setattr(ledger, "unwritten", lambda layout: ledger.filled(unwritten(layout), nan))


def unseen(kernel, *args):
    """As a function of an extension, which launches its kernels on addresses."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        return kernel(*args)


class Exp(torch.autograd.Function):
    """Its kernel fills what ``make`` makes."""

    @staticmethod
    def forward(ctx, x, make):
        y = unseen(torch.exp, x) if make is None else make(x)
        if make is not None:
            unseen(lambda: y.copy_(x.exp()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


class ScaledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.mark_dirty(x)
        return unseen(x.mul_, scale.detach())

    @staticmethod
    def backward(ctx, g):
        return g, None


def largest(x, make):
    """Where the largest element of each row is, by a kernel that is in no Function."""
    indices = make(x[:, :1].long())
    unseen(lambda: indices.copy_(x.argmax(1, keepdim=True)))
    return indices


def apart(make):
    return lambda h: h.sin().gather(1, largest(h.cos(), make)).exp()


def twice(make):
    """A kernel fills memory, and another one adds to it when it has been read."""

    def f(h):
        state = make(h)
        unseen(lambda: state.copy_(h.sin()))
        once, more = h + state, (h * 3).cos()
        unseen(lambda: state.add_(more.exp()))
        return once + (h * state.clone()).cos()

    return f


REGIONS = {
    **{f"a Function, {n}": lambda h, m=make: Exp.apply(h, m) for n, make in MAKERS.items()},
    "a Function, memory of its own": lambda h: Exp.apply(h, None),
    "in place": lambda h: ScaledInPlace.apply(h.sin() * 2, h.cos()).exp(),
    **{f"in no Function, {name}": apart(make) for name, make in MAKERS.items()},
    **{f"twice, {name}": twice(make) for name, make in MAKERS.items()},
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("policy", [None, functx.checkpoint_policies.dots_saveable])
def test_gradients_through_unseen_code_are_those_without_remat(name, policy):
    x, w = numbers(3, 4), numbers(4, 4).requires_grad_()
    f = lambda x, w: REGIONS[name](x @ w).sum()
    inner = functx.remat(f, policy=policy)
    outer = functx.remat(lambda x, w: inner(x, w).exp())
    for region, plain in ((inner, f), (outer, lambda x, w: f(x, w).exp())):
        expected = torch.autograd.grad(plain(x, w), w)
        for _ in range(RUNS):
            torch.testing.assert_close(torch.autograd.grad(region(x, w), w), expected)
