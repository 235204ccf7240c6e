"""Networks as chains of blocks, and trees of regions around them: what plans are compared with."""

import itertools

import torch
from references import peak
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import functx
from functx._budget import block_costs
from functx._core import tree as _tree


class Residual(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.second(x))


class Down(nn.Module):
    """Half of the size; what it was goes along, for the way up."""

    def __init__(self, channels, out):
        super().__init__()
        self.convolution = nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, state):
        x, *skips = state
        x = F.relu(self.convolution(x))
        return (F.avg_pool2d(x, 2), x, *skips)


class Up(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.convolution = nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, state):
        x, skip, *skips = state
        x = torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1)
        return (F.relu(self.convolution(x)), *skips)


def mlp():
    return [nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(16)], torch.randn(200, 24)


def transformer():
    return [Residual(16) for _ in range(6)], torch.randn(4, 24, 16)


def conv_net():
    widths = [3, 8, 8, 16, 16, 16]
    blocks = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        blocks += [nn.Conv2d(a, b, 3, padding=1, stride=1 + i % 2), nn.BatchNorm2d(b), nn.ReLU()]
    return blocks, torch.randn(4, 3, 24, 24)


def u_net():
    blocks = [Down(3, 8), Down(8, 16), Down(16, 16)]
    blocks += [Up(32, 16), Up(32, 8), Up(16, 4), lambda state: state[0].mean((1, 2, 3))]
    return blocks, (torch.randn(4, 3, 32, 32),)


class Chain(nn.Module):
    """A network as one module, with control flow of its own."""

    def __init__(self, blocks):
        super().__init__()
        self.order = list(blocks)
        self.blocks = nn.ModuleList(b for b in self.order if isinstance(b, nn.Module))

    def forward(self, x):
        for block in self.order:
            x = block(x)
        return x


NETWORKS = {"mlp": mlp, "transformer": transformer, "conv net": conv_net, "u-net": u_net}


def all_trees(start, end):
    """Every way to cut a stretch of blocks; none is a region of all of it."""
    if start == end:
        yield []
        return
    for rest in all_trees(start + 1, end):
        yield [start, *rest]
    for cut in range(start + 1, end):
        for inside in all_trees(start, cut):
            for rest in all_trees(cut, end):
                yield [inside, *rest]


def pullback_peak(tree, blocks, x):
    """What a tree is measured to take: one forward, and one pullback of everything."""
    wanted = [True] * len(_tree.leaves(x))
    return peak(block_costs.there_and_back, lambda x: block_costs.walk(tree, blocks, x), x, wanted)


def works(blocks, x):
    """The FLOPs of each block."""
    found = []
    for block in blocks:
        found.append(functx.plan([block], x, budget=1.0).work)
        x = block(x)
    return found


def there_and_back(f, blocks, x):
    """Result, and gradients of the input and of all parameters, on plain autograd."""
    leaves, spec = pytree.tree_flatten(x)
    leaves = [t.detach().requires_grad_() for t in leaves]
    out = f(pytree.tree_unflatten(leaves, spec))
    parameters = [p for b in blocks if isinstance(b, nn.Module) for p in b.parameters()]
    return out, torch.autograd.grad(out.sum(), [*leaves, *parameters])
