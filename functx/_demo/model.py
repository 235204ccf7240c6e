"""A vision transformer for 8x8 digits, as a pure function of a dictionary of parameters.

One pixel is one token: 64 tokens an image, so that attention and activations, not parameters, fill
memory. Every function takes one example; batches are `vmap`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Params = dict[str, torch.Tensor]
Block = Callable[[Params, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """The shape of the network.

    Attributes:
        depth: Number of blocks.
        width: Numbers a token.
        heads: Attention heads; they divide ``width``.
        hidden: Width of the MLP in a block.
    """

    depth: int = 6
    width: int = 32
    heads: int = 4
    hidden: int = 64


TOKENS = 64
CLASSES = 10


def init(size: Size, seed: int = 0) -> Params:
    """Parameters for a network of ``size``, float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    width, hidden = size.width, size.hidden
    params = {
        "pixel": normal(width, scale=1.0),
        "position": normal(TOKENS, width, scale=0.5),
        "head.weight": normal(width, CLASSES, scale=width**-0.5),
        "head.bias": torch.zeros(CLASSES),
    }
    for i in range(size.depth):
        params |= {
            f"{i}.qkv": normal(width, 3 * width, scale=width**-0.5),
            f"{i}.project": normal(width, width, scale=(width * 2 * size.depth) ** -0.5),
            f"{i}.up": normal(width, hidden, scale=width**-0.5),
            f"{i}.down": normal(hidden, width, scale=(hidden * 2 * size.depth) ** -0.5),
        }
    return params


def block(params: Params, x: torch.Tensor, heads: int) -> torch.Tensor:
    """Attention and an MLP, each behind a layer norm and added to its input.

    Args:
        params: ``qkv`` (width, 3 width), ``project`` (width, width), ``up`` (width, hidden) and
            ``down`` (hidden, width).
        x: Tokens, (64, width).
        heads: How many parts the width is split into for attention.

    Returns:
        Tokens, (64, width).
    """
    tokens, width = x.shape
    qkv = F.layer_norm(x, (width,)) @ params["qkv"]
    q, k, v = qkv.reshape(tokens, 3, heads, width // heads).permute(1, 2, 0, 3).unbind()
    scores = q @ k.transpose(-1, -2) * (width // heads) ** -0.5
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, width)
    x = x + mixed @ params["project"]
    return x + F.gelu(F.layer_norm(x, (width,)) @ params["up"]) @ params["down"]


def logits(params: Params, image: torch.Tensor, size: Size, block: Block = block) -> torch.Tensor:
    """Scores of the ten digits for one image of 64 pixels in [0, 1]: shape (10,)."""
    x = image[:, None] * params["pixel"] + params["position"]
    for i in range(size.depth):
        prefix = f"{i}."
        own = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        x = block(own, x, size.heads)
    x = F.layer_norm(x, (size.width,)).mean(0)
    return x @ params["head.weight"] + params["head.bias"]


def loss(
    params: Params, image: torch.Tensor, label: torch.Tensor, size: Size, block: Block = block
) -> torch.Tensor:
    """Cross entropy of one image, a scalar."""
    return F.cross_entropy(logits(params, image, size, block), label)
