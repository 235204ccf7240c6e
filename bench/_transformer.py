"""The transformer of the benches: tokens in, scores of the next token out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import functx


class Block(nn.Module):
    """A block of a transformer: attention and a network of one hidden layer, before each a norm.

    Args:
        width: Of the residual stream.
        heads: Of the attention.
        fused: Attention to earlier tokens alone, by torch's fused kernel; else to all, by products
            of matrices, which every method can follow.
    """

    def __init__(self, width: int, heads: int, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attended(x)
        return x + self.down(self.hidden(x))

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        """The first half, attention, with the residual stream."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = functx.checkpoint_name(mixed, "attention")
        else:
            mixed = torch.softmax(q @ k.mT / (width // self.heads) ** 0.5, -1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """What the last product reads."""
        return F.gelu(self.up(self.norm2(x)))


class Transformer(nn.Module):
    """Tokens in, scores of the next token out; positions are embedded, as Opacus can follow.

    Attributes:
        chain: How the blocks run one after another; may be replaced by something that recomputes.
    """

    def __init__(
        self,
        tokens: int,
        layers: int = 4,
        width: int = 128,
        vocabulary: int = 256,
        heads: int = 4,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.chain: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape).contiguous()
        x = self.embed(x) + self.position(positions)
        if self.chain is not None:
            x = self.chain(x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))
