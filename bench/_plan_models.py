"""The networks of `bench.budget`, as chains of blocks; what goes on is whatever a block returns."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a network of one hidden layer, before each a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.second(x))))


class Down(nn.Module):
    """Half of the size; what it was goes along, for the way up."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, state: Any) -> Any:
        x, *skips = state
        x = F.relu(self.convolution(x))
        return (F.avg_pool2d(x, 2), x, *skips)


class Up(nn.Module):
    """Twice the size, with what it was on the way down."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, out, 3, padding=1)

    def forward(self, state: Any) -> Any:
        x, skip, *skips = state
        x = torch.cat([F.interpolate(x, scale_factor=2.0), skip], dim=1)
        return (F.relu(self.convolution(x)), *skips)


Chain = tuple[list[Any], Any]


def mlp() -> Chain:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)]
    return [*layers], torch.randn(2048, 64)


def transformer() -> Chain:
    return [Block(64, 4) for _ in range(8)], torch.randn(8, 64, 64)


def conv_net() -> Chain:
    widths = [3, 16, 16, 32, 32, 32]
    blocks: list[Any] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        blocks.append(nn.Conv2d(a, b, 3, padding=1, stride=1 + i % 2))
        blocks += [nn.BatchNorm2d(b), nn.ReLU()]
    return blocks, torch.randn(8, 3, 48, 48)


def u_net() -> Chain:
    blocks: list[Any] = [Down(3, 16), Down(16, 32), Down(32, 32)]
    blocks += [Up(64, 32), Up(64, 16), Up(32, 8)]
    return blocks, (torch.randn(8, 3, 48, 48),)


class Steps(nn.Module):
    """Some steps of a recurrent cell; all blocks share its weights."""

    def __init__(self, cell: nn.LSTMCell, first: int, steps: int) -> None:
        super().__init__()
        self.cell = cell
        self.steps = range(first, first + steps)

    def forward(self, state: Any) -> Any:
        x, hidden, memory = state
        for step in self.steps:
            hidden, memory = self.cell(x[:, step], (hidden, memory))
        return x, hidden, memory


class Branches(nn.Module):
    """Convolutions of several sizes side by side, some of them deeper than others."""

    def __init__(self, channels: int, *widths: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList()
        for i, width in enumerate(widths):
            parts: list[nn.Module] = [nn.Conv2d(channels, width, 1), nn.ReLU()]
            for _ in range(i):
                parts += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
            self.branches.append(nn.Sequential(*parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Hidden(nn.Module):
    """A block of a Hugging Face model, from hidden states to hidden states."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.block(x)
        return out if isinstance(out, torch.Tensor) else out[0]


def gpt2() -> Chain:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=64, n_head=4, n_layer=8, n_positions=64, vocab_size=64)
    return [Hidden(block) for block in GPT2Model(config).eval().h], torch.randn(8, 64, 64)


def rnn() -> Chain:
    cell = nn.LSTMCell(32, 64)
    state = torch.randn(64, 64, 32), torch.zeros(64, 64), torch.zeros(64, 64)
    return [Steps(cell, first, 4) for first in range(0, 32, 4)], state


def branchy() -> Chain:
    blocks: list[Any] = [Branches(3, 4, 8, 4), Branches(16, 8, 16, 8), nn.MaxPool2d(2)]
    blocks += [Branches(32, 4, 4, 4, 4), nn.BatchNorm2d(16), Branches(16, 32, 16), nn.MaxPool2d(2)]
    blocks += [Branches(48, 8), nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 3)]
    return blocks, torch.randn(8, 3, 40, 40)


NETWORKS = {
    "MLP": mlp,
    "transformer": transformer,
    "conv net": conv_net,
    "U-Net": u_net,
    "GPT-2 (transformers)": gpt2,
    "LSTM, weights shared": rnn,
    "branches of unequal size": branchy,
}
