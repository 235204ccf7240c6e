"""Peaks of real blocks at the base level: never above those of torch's checkpoint.

Nothing is left for chance: the same kernels run in both, and bytes are counted exactly.
"""

import pytest
import torch
from references import peak
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import functx


def checkpointed(f):
    return lambda *args: checkpoint(f, *args, use_reentrant=False)


class Attention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        attended = torch.softmax(q @ k.mT, -1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Residual(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        hidden = F.relu(self.norms[0](self.convolutions[0](x)))
        return F.relu(x + self.norms[1](self.convolutions[1](hidden)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(16, 16, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


class Experts(nn.Module):
    """Every row goes to one of them, by index."""

    def __init__(self, width=16, experts=3):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
            for _ in range(experts)
        )

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return x + out


class Chain(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x, region):
        for block in self.blocks:
            x = region(block)(x)
        return x


NETWORKS = {
    "attention": (lambda: Chain(Attention), (2, 16, 32)),
    "residual": (lambda: Chain(Residual).eval(), (2, 8, 16, 16)),
    "recurrent": (lambda: Chain(Recurrent), (4, 8, 16)),
    "experts": (lambda: Chain(Experts), (128, 16)),
}


def gradients_of(network, frozen):
    """A network, and what takes its gradients by regions."""
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    model = make().requires_grad_(not frozen)
    x = torch.randn(shape, requires_grad=True)
    of = [x] if frozen else [x, *model.parameters()]

    def run(region):
        return torch.autograd.grad(model(x, region).square().mean(), of)

    return model, run


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_no_more_than_torchs_checkpoint(network, frozen):
    model, run = gradients_of(network, frozen)
    ours, theirs, plain = (
        peak(run, region) for region in (functx.remat, checkpointed, lambda f: f)
    )
    # A node of plain autograd has the gradient of its bias before it lets go of what it saved; what
    # torch's checkpoint unpacks for it is gone by then.
    bias = max(p.nbytes for p in model.parameters() if p.dim() == 1)
    # A replay has all that its pullback reads at once, where torch's checkpoint lets go of some.
    assert ours <= theirs * 1.13 + bias < plain


@pytest.mark.parametrize(("length", "segments"), [(12, 4), (16, 4), (12, 2)])
def test_a_chain_in_segments_peaks_as_torchs(length, segments):
    """And as regions written by hand."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(length)]
    size = length // segments

    def by_hand(x):
        for first in range(0, length, size):
            part = nn.Sequential(*layers[first : first + size])
            x = (functx.remat(part) if first + size < length else part)(x)
        return x

    def run(chain):
        x = torch.ones(512, 8, requires_grad=True)
        chain(x).sum().backward()
        for layer in layers:
            layer.zero_grad()

    ours = peak(run, lambda x: functx.remat_sequential(layers, segments, x))

    def torchs(x):
        return checkpoint_sequential(layers, segments, x, use_reentrant=False)

    # A region hands over all gradients of its parameters at once: a layer's are there earlier.
    gradients = sum(p.nbytes for p in layers[0].parameters())
    assert ours <= peak(run, by_hand)
    assert ours <= peak(run, torchs) + gradients


class Adapted(nn.Module):
    """A frozen layer, and a trained difference of low rank."""

    def __init__(self, width=64, rank=2):
        super().__init__()
        self.base = nn.Linear(width, 2 * width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, 2 * width, bias=False)
        self.out = nn.Linear(2 * width, width).requires_grad_(False)

    def forward(self, x):
        return x + self.out(F.gelu(self.base(x) + self.up(self.down(x))))


TRAINED = {
    "adapted": lambda: Chain(Adapted),
    "experts": lambda: Chain(lambda: Experts(64)),
}


def own(block):
    """The bytes of the gradients of a block's parameters."""
    return sum(p.nbytes for p in block.parameters() if p.requires_grad)


def bound(model, x, accumulated):
    """Boundaries, what one block takes by itself, and other gradients, at the worst moment."""
    blocks = [*model.blocks]
    trained = [own(block) > 0 for block in blocks]
    first, worst = trained.index(True), 0
    total = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    for k in range(first, len(blocks)):
        h = x.clone().requires_grad_()
        saved = functx.memory.profile(blocks[k], h)
        forward = peak(blocks[k], h)  # with what goes at once; in a replay, beside a cotangent
        one = max(saved.kept + saved.returned + own(blocks[k]), forward) + x.nbytes
        others = total if accumulated else sum(map(own, blocks[k + 1 :]))
        boundaries = max(k - first + (first > 0), 0) * x.nbytes
        worst = max(worst, boundaries + one + others)
    return worst


@pytest.mark.parametrize("accumulated", [False, True], ids=["once", "accumulated"])
@pytest.mark.parametrize("network", TRAINED)
def test_within_a_tenth_of_the_bound(network, accumulated):
    """And frozen parameters, and what comes before trained ones, cost nothing."""
    torch.manual_seed(0)
    model, x = TRAINED[network](), torch.randn(128, 64)
    trained = [p for p in model.parameters() if p.requires_grad]

    def run(region):
        if not accumulated:
            return torch.autograd.grad(model(x, region).square().mean(), trained)
        for _ in range(2):
            model(x, region).square().mean().backward()
        for p in trained:
            p.grad = None
        return None

    assert peak(run, functx.remat) <= 1.1 * bound(model, x, accumulated)
    assert peak(run, functx.remat) < peak(run, lambda f: f)
