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


NETWORKS = {"MLP": mlp, "transformer": transformer, "conv net": conv_net, "U-Net": u_net}
