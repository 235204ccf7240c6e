"""Regions that count how often their bodies run, till their pullbacks are known; and bodies."""

import ctypes

import torch
from cases import DTYPE, numbers
from torch import nn
from torch.nn import functional as F

import functx
from functx._remat import _known_runs

KNOWN = _known_runs.ALIKE + 2
"""So many runs, and the pullback of the next one is no replay."""

X = numbers(3, 4)
W = numbers(4, 4, start=0.3)


class Calls:
    """A function that counts its calls, as a region."""

    def __init__(self, f, **options):
        self.f = f
        # What a replay changes in lists, objects and files is put back.
        self._count = count = ctypes.c_int()

        def counted(*args):
            count.value += 1
            return f(*args)

        self.region = functx.remat(counted, **options)

    @property
    def n(self):
        """How often it was called."""
        return self._count.value

    def replays(self, run, *args):
        """How often a body runs again in ``run``, which runs the region once; and what it gives."""
        before = self.n
        out = run(self.region, *args)
        return self.n - before - 1, out


def pulled(f, *inputs, cotangent=None):
    """Gradients of all inputs."""
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    outs = f(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    outs = [o for o in outs if o.requires_grad]
    cotangents = [torch.ones_like(o) * (i + 2) for i, o in enumerate(outs)]
    if cotangent is not None:
        cotangents = [cotangent(c) for c in cotangents]
    return torch.autograd.grad(
        outs, [t for t in inputs if t.requires_grad], cotangents, allow_unused=True
    )


def wrong(code):
    """Code whose gradients are others."""
    return lambda given: [None if g is None else g + 1 for g in code(given)]


def known(f, *inputs, **options):
    """A region of ``f`` whose pullback is known."""
    calls = Calls(f, **options)
    for _ in range(KNOWN):
        calls.replays(pulled, *inputs)
    assert calls.replays(pulled, *inputs)[0] == 0
    return calls


def several(x, w):
    h = torch.tanh(x @ w)
    a, b = h.chunk(2)[0], h.sum(0)
    return a * 2, b.exp(), a.sin()


def slice_written(x):
    h = x * 2
    h[:, 1:3] = x[:, :2].sin()
    h[0].neg_()
    return h.cumsum(0).tanh()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(1, 3, 3, 2, 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(3, 4))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4)

    def forward(self, x):
        return F.max_pool1d(F.gelu(self.norm(self.conv(x[None]))), 2)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4).eval()
        self.of_instance = nn.InstanceNorm1d(4, affine=True)

    def forward(self, x):
        return self.of_instance(self.norm(self.conv(x[None])).sin())


def module(kind):
    torch.manual_seed(0)
    return kind().double()


BODIES = {
    "sin": (torch.sin, X),
    "sin of sin": (lambda x: x.sin().sin(), X),
    "a chain": (lambda x: x.sin().exp().tanh().cos(), X),
    "two inputs": (lambda x, w: torch.relu(x @ w) @ w, X, W),
    "an input twice": (lambda x, w: x * w * x, X, X),
    "several results": (several, X, W),
    "views": (
        lambda x: x.mT.reshape(2, 6).unfold(1, 2, 1).exp().sum(-1) * x.view(-1)[1:3, None],
        X,
    ),
    "stacked": (lambda x: torch.stack([x, x.exp(), x * 2]).cumsum(0).unbind()[1], X),
    "indexed": (lambda x: x[torch.tensor([2, 0, 2])].exp() * x[:, [1]], X),
    "a sum with numbers": (lambda x: (torch.tensor([[2.0, 1, 0, 1]] * 3).double() + x).tanh(), X),
    "a sum with a row": (lambda x: (torch.tensor([2, 1, 0, 1], dtype=DTYPE) + x.sum(0)).tanh(), X),
    "chosen": (lambda x: torch.where(x > 0.5, x.exp(), 2.0) * x.amax(0), X),
    "in place": (lambda x, w: F.relu(x @ w - 0.5, inplace=True).exp() * x, X, W),
    "a slice is written": (slice_written, X),
    "a linear map": (lambda x: x * 3 - 1, X),
    "complex": (lambda x: torch.view_as_real(torch.fft.fft(x) * torch.polar(x, x)).sum(-1), X),
    "infinite": (lambda x: (x - X).exp() * float("inf"), X),
    "a loss": (lambda x, w: F.cross_entropy(x @ w, torch.tensor([0, 3, 1])), X, W),
}
