"""Small modules, built twice from one seed: behind remat and not."""

import torch
from cases import DTYPE, numbers
from torch import nn

import functx


class Block(nn.Module):
    """A block with a parameter, a buffer, submodules and an attribute."""

    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=DTYPE)
        self.scale = nn.Parameter(numbers(width))
        self.register_buffer("shift", numbers(width, start=1.0))
        self.factor = 2.0

    def forward(self, x, power=1):
        return torch.tanh(self.linear(x)) ** power * self.scale + self.shift * self.factor

    def helper(self):
        return self.factor


class Net(nn.Module):
    def __init__(self, remat=functx.remat):
        super().__init__()
        self.first = remat(Block())
        self.blocks = nn.ModuleList(remat(Block()) for _ in range(2))
        self.head = nn.Linear(3, 1, dtype=DTYPE)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(build, *args):
    torch.manual_seed(1)
    return build(*args)


def pair(build):
    """The same module twice, the first behind remat."""
    return functx.remat(seeded(build)), seeded(build)
