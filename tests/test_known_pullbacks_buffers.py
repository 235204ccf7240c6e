"""Known pullbacks of regions that write to constants: buffers of norms, counters."""

import copy
import functools

import pytest
import torch
from known import KNOWN, X, pulled
from references import assert_same
from torch import nn

import functx
from functx._remat import _known_pullbacks, _straight_line

pytestmark = pytest.mark.usefixtures("forgotten")

STEPS = KNOWN + 4


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)).add_(1))


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        out = self.linear(x).tanh() / self.calls
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, out.flatten(0, -2).amax(0)))
        return out * self.largest


class Read(nn.Module):
    """What is read is not what is written later."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        out = (x - self.mean).exp()
        self.mean.mul_(0.5).add_(x.detach().flatten(0, -2).mean(0) * 0.5)
        return out * self.mean


class Bound(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean * 0.5 + x.detach().flatten(0, -2).mean(0)
        return (x - self.mean).exp()


class WithItsTape(nn.Module):
    """The buffer comes to have a history, which the next forward drops."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale.detach_()
        self.scale.mul_(x.flatten(0, -2).sigmoid().mean(0))
        return x * self.scale


class Codes:
    """How often a pullback ran without a replay."""

    def __init__(self, patch):
        self.n, call = 0, _known_pullbacks.Known.__call__

        def counted(known, *of):
            self.n += 1
            return call(known, *of)

        patch.setattr(_known_pullbacks.Known, "__call__", counted)


@pytest.fixture
def codes(monkeypatch):
    return Codes(monkeypatch)


def step(module, region, x, between=None):
    x = x.clone().requires_grad_()
    out = region(x)
    if between is not None:
        between()
    gradients = torch.autograd.grad(out.pow(2).sum(), [x, *module.parameters()])
    return out, gradients, [*module.buffers()]


def compared(kind, between=None, steps=STEPS):
    """Each step gives the same bits, and leaves the same in buffers, as without remat."""
    torch.manual_seed(0)
    plain = kind().double()
    ours = copy.deepcopy(plain)
    region = functx.remat(ours)
    for i in range(steps):
        x = torch.stack([X, X * 2]) + i
        expected = step(plain, plain, x, between and functools.partial(between, plain))
        found = step(ours, region, x, between and functools.partial(between, region))
        assert_same(found, expected)


@pytest.mark.parametrize("kind", [Norm, Counted, Read])
def test_buffers_advance_once(kind, codes):
    compared(kind)
    assert codes.n == STEPS - KNOWN


@pytest.mark.parametrize("kind", [Norm, Counted, Read])
def test_buffers_that_others_write_to_in_between(kind, codes):
    """What the forward found is computed with, not what is there by the backward pass."""

    def write(module):
        for buffer in module.buffers():
            buffer.add_(3)

    torch.manual_seed(0)
    plain = kind().double()
    ours = copy.deepcopy(plain)
    region = functx.remat(ours)
    for i in range(STEPS):
        x = torch.stack([X, X * 2]) + i
        expected = step(plain, plain, x)  # where torch refuses to go back once they are written to
        write(plain)
        assert_same(step(ours, region, x, lambda: write(ours)), expected)
    assert codes.n == STEPS - KNOWN


def test_another_forward_in_between(codes):
    compared(Norm, lambda run: run(torch.stack([X, -X])))
    assert codes.n > 0


def test_a_norm_that_is_evaluated_at_times():
    torch.manual_seed(0)
    plain = Norm().double()
    ours = copy.deepcopy(plain)
    region = functx.remat(ours)
    for i in range(2 * KNOWN):
        for module in (plain, ours):
            module.train(i % 5 != 4)
        x = torch.stack([X, X * 2]) + i
        assert_same(step(ours, region, x), step(plain, plain, x))


@pytest.mark.parametrize("kind", [Bound, WithItsTape])
def test_what_is_held_or_has_a_history_is_a_replay(kind, codes):
    compared(kind)
    assert codes.n == 0


class Counting(nn.Module):
    """What it binds anew, no operation reads."""

    def __init__(self):
        super().__init__()
        self.calls, self.shapes = 0, []

    def forward(self, x):
        self.calls += 1
        self.shapes.append(x.shape)
        return x.exp().sin()


def test_what_only_python_sees(codes):
    module = Counting()
    region = functx.remat(module)
    for i in range(STEPS):
        assert_same(pulled(region, X + i), pulled(lambda x: x.exp().sin(), X + i))
        assert module.calls == len(module.shapes) == i + 1
    assert codes.n == STEPS - KNOWN


def test_code_never_writes_to_what_it_is_given():
    x = X.clone()
    recorder = _straight_line.Recorder([x], 1, lambda: True)
    with recorder:
        out = x.mul_(2).sin()
    assert recorder.code([out]) is None


def test_an_argument_that_is_written_to_is_a_replay(codes):
    def f(x, count):
        count.add_(1)
        return x.exp() * count

    region = functx.remat(f)
    ours, theirs = torch.zeros((), dtype=X.dtype), torch.zeros((), dtype=X.dtype)
    for _ in range(STEPS):
        found = pulled(lambda x: region(x, ours), X)
        assert_same(found, pulled(lambda x: f(x, theirs), X))
        assert ours == theirs
    assert codes.n == 0
