"""Stacks of twelve equal blocks: an MLP, a transformer, a convolutional network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import functx
from bench._transformer import Block

Function = Callable[[torch.Tensor], torch.Tensor]
LAYERS = 12


@dataclass
class Stack:
    """A network.

    Attributes:
        name: As in the tables.
        blocks: One after another.
        x: What goes in, and has the shape of what is between the blocks.
    """

    name: str
    blocks: nn.ModuleList
    x: torch.Tensor

    @property
    def activation(self) -> int:
        """Bytes between two blocks."""
        return self.x.numel() * self.x.element_size()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.blocks.parameters())


def loss(blocks: Sequence[Function], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x.square().mean()


def checkpointed(block: Function) -> Function:
    return lambda x: checkpoint(block, x, use_reentrant=False)


REGIONS: dict[str, Callable[[Function], Function]] = {
    "-": lambda block: block,
    "torch.utils.checkpoint": checkpointed,
    "functx.remat": functx.remat,
}


def mlp_block() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def transformer_block() -> nn.Module:
    return Block(256, 4)


def convolutional_block() -> nn.Module:
    def half() -> list[nn.Module]:
        return [nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()]

    return nn.Sequential(*half(), *half())


def stacks(device: torch.device) -> list[Stack]:
    torch.manual_seed(0)

    def made(name: str, block: Callable[[], nn.Module], *shape: int) -> Stack:
        blocks = nn.ModuleList(block() for _ in range(LAYERS)).to(device)
        return Stack(name, blocks, torch.randn(*shape, device=device))

    return [
        made("MLP, width 256, 1,024 examples", mlp_block, 1024, 256),
        made("transformer, width 256, T 128, B 8", transformer_block, 8, 128, 256),
        made("conv net, 32 channels, 32x32, B 16", convolutional_block, 16, 32, 32, 32),
    ]
