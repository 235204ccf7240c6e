"""No run takes more memory than others: not that which is written down, nor that which is compared.

Bytes are the allocator's: under a mode that counts them every pullback would be a replay.
"""

import pytest
import torch
from cases import deep_mlp, numbers
from known import KNOWN, Calls
from references import allocated, no_garbage_collection
from test_peaks import TRAINED, Chain, checkpointed, gradients_of
from torch import nn

import functx
from functx import _unwritten
from functx._remat import _checksum, _room
from functx._remat._checksum import checksum
from functx._unwritten import unwritten

pytestmark = pytest.mark.usefixtures("forgotten")


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch):
    """Without the numbers that show, in other tests, who reads what is left out."""
    monkeypatch.setattr(_unwritten, "unwritten", unwritten)


LAYERS, SEGMENT = 24, 4
WEIGHTS, X, _ = deep_mlp(LAYERS, 512, 64)
ACTIVATION = X.nbytes


def block(x, weights):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def chained(weights, x, remat=functx.remat):
    for start in range(0, len(weights), SEGMENT):
        x = remat(block)(x, weights[start : start + SEGMENT])
    return x.square().sum()


def autograd(remat=functx.remat):
    weights = [w.detach().requires_grad_() for w in WEIGHTS]
    return torch.autograd.grad(chained(weights, X, remat), weights)


def backward(remat=functx.remat):
    weights = [w.detach().requires_grad_() for w in WEIGHTS]
    chained(weights, X, remat).backward()


def of_inputs():
    x = X.detach().requires_grad_()
    return torch.autograd.grad(chained(WEIGHTS, x), x)


WAYS = {
    "autograd": (autograd, 11.01),
    "backward": (backward, 11.01),
    "grad": (lambda: functx.grad(chained)(WEIGHTS, X), 11.01),
    "of inputs": (of_inputs, 10.04),
    "vmap(grad)": (
        lambda: functx.vmap(functx.grad(chained, argnums=1), (None, 0))(WEIGHTS, X[:, None]),
        10.04,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_deep_network(way):
    """In its first run a pullback is written down already, and the next one compared."""
    run, most = WAYS[way]
    assert [n for _ in range(7) if (n := allocated(run) / ACTIVATION) > most] == []


@pytest.mark.parametrize("run", [autograd, backward])
def test_no_more_than_torchs_checkpoint(run):
    theirs = allocated(run, checkpointed)
    assert max(allocated(run) for _ in range(7)) <= theirs


@pytest.mark.parametrize("network", ["attention", "residual", "recurrent", "skips"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_networks(network, frozen):
    """A region each for modules that run once a step, whose pullbacks are all known in the end."""
    _, run = gradients_of(network, frozen)
    theirs = allocated(run, checkpointed)
    assert max(allocated(run, functx.remat) for _ in range(7)) <= theirs


@pytest.mark.parametrize("network", TRAINED)
def test_accumulated_gradients(network):
    """Where the mode under which it is written down would have formulas run out of place, too."""
    torch.manual_seed(0)
    model, x = TRAINED[network](), torch.randn(128, 64)

    def run(region):
        for _ in range(2):
            model(x, region).square().mean().backward()
        model.zero_grad()

    theirs = allocated(run, checkpointed)
    assert max(allocated(run, functx.remat) for _ in range(5)) <= theirs


class Convolutions(nn.Sequential):
    def __init__(self):
        half = nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()
        super().__init__(*half, nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU())


def test_what_kernels_take_counts():
    """A convolution has memory of its own: there, nothing that has been read may stay."""
    torch.manual_seed(0)
    model, x = Chain(Convolutions), torch.randn(4, 32, 16, 16)

    def run():
        return torch.autograd.grad(model(x, functx.remat).mean(), [*model.parameters()])

    peaks = [allocated(run) for _ in range(7)]
    assert max(peaks) <= min(peaks) * 1.01


def test_a_pullback_is_compared_where_there_is_room():
    """One that by itself would peak higher is replayed, till boundaries have gone before."""

    def body(x):  # what comes last in the backward pass is the largest
        return torch.cat([x] * 8).sin()[:256].sin().view(4, 64, 64).sum(0)

    def replays(times):
        x = out = numbers(64, 64).requires_grad_()
        before = calls.n
        for _ in range(times):
            out = calls.region(out)
        peaks.append(allocated(torch.autograd.grad, out, x, numbers(64, 64) * 2))
        return calls.n - before - times

    calls, peaks = Calls(body), []
    assert [replays(1) for _ in range(KNOWN + 3)] == [1] * (KNOWN + 3)
    assert max(peaks) <= min(peaks) + 4096
    assert replays(4) == 4
    assert replays(1) == 0


@pytest.mark.parametrize(
    ("needs", "level", "room"),
    [
        (_room.Needs(100, 100), 0, True),
        (_room.Needs(10**6, 10**6 + 4000), 0, True),
        (_room.Needs(10**6, 10**6 + 10**5), 0, False),
        (_room.Needs(10**6, 10**6 + 10**5), -(10**5), True),
    ],
)
def test_where_there_is_room(needs, level, room):
    _room.begins([])
    _room.ends([], 0, _room.Needs(10**6, 10**7))
    assert _room.is_there(level, needs) == room
    _room._pass.task = -2


@pytest.mark.parametrize("make", [torch.Tensor.mT.__get__, lambda t: t[:, ::2], lambda t: t])
def test_a_checksum_of_any_layout(make):
    t = make(numbers(600, 500))
    for lean in (False, True):
        assert checksum(t, lean=lean) == checksum(t.clone(), lean=lean)
        other = t.clone()
        other[-1, -1] += 1
        assert checksum(t, lean=lean) != checksum(other, lean=lean)
    with no_garbage_collection():
        assert allocated(checksum, t, lean=True) < t.nbytes / 10
    assert _checksum._LEAST < 1000
