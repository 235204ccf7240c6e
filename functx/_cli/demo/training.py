"""Train a vision transformer on handwritten digits, with clipped gradients of each example.

The data are scikit-learn's 1,797 scans of digits. Each pixel is a token, so an image has 64 tokens,
and attention and activations take more memory than the parameters. The network is a pure function
of parameters and one image; `vmap` maps it over a batch.

The gradient of every example is scaled down to a norm of at most ``clip`` before the mean is taken,
as in differentially private SGD (without noise). So no single image moves the parameters far. Abadi
et al., Deep learning with differential privacy, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

import functx

Params = dict[str, Tensor]
Block = Callable[[Params, Tensor], Tensor]

PIXELS, CLASSES, HEADS = 64, 10, 4


def load(limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Images (n, 64), float32 in [0, 1], and labels (n,), int64, in a fixed random order."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:limit]
    return torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def init(depth: int = 6, width: int = 32, hidden: int = 64) -> Params:
    """Parameters of a network of ``depth`` blocks, whose MLPs are ``hidden`` wide; on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    params = {
        "pixel": normal(width, scale=1.0),
        "position": normal(PIXELS, width, scale=0.5),
        "head.weight": normal(width, CLASSES, scale=width**-0.5),
        "head.bias": torch.zeros(CLASSES),
    }
    for i in range(depth):
        params |= {
            f"{i}.qkv": normal(width, 3 * width, scale=width**-0.5),
            f"{i}.project": normal(width, width, scale=(width * 2 * depth) ** -0.5),
            f"{i}.up": normal(width, hidden, scale=width**-0.5),
            f"{i}.down": normal(hidden, width, scale=(hidden * 2 * depth) ** -0.5),
        }
    return params


def block(params: Params, x: Tensor) -> Tensor:
    """Attention and an MLP over tokens (64, width), each behind a layer norm."""
    tokens, width = x.shape
    qkv = F.layer_norm(x, (width,)) @ params["qkv"]
    q, k, v = qkv.reshape(tokens, 3, HEADS, width // HEADS).permute(1, 2, 0, 3).unbind()
    scores = q @ k.transpose(-1, -2) * (width // HEADS) ** -0.5
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, width) @ params["project"]
    return x + F.gelu(F.layer_norm(x, (width,)) @ params["up"]) @ params["down"]


def logits(params: Params, image: Tensor, block: Block = block) -> Tensor:
    """Scores of the ten digits for one image of 64 pixels: shape (10,)."""
    x = image[:, None] * params["pixel"] + params["position"]
    for i in range(sum(name.endswith(".qkv") for name in params)):
        own = {name: params[f"{i}.{name}"] for name in ("qkv", "project", "up", "down")}
        x = block(own, x)
    x = F.layer_norm(x, x.shape[-1:]).mean(0)
    return x @ params["head.weight"] + params["head.bias"]


def loss(params: Params, image: Tensor, label: Tensor, block: Block = block) -> Tensor:
    """Cross entropy of one image, a scalar."""
    return F.cross_entropy(logits(params, image, block), label)


def per_example_gradients(block: Block, library: Any = functx) -> Any:
    """A function of (params, images, labels) that returns one gradient per image.

    Each leaf of its result has the batch dimension, followed by the shape of the parameter.
    """
    return library.vmap(library.grad(partial(loss, block=block)), in_dims=(None, 0, 0))


def clipped_mean(gradients: Params, clip: float) -> Params:
    """The mean over the batch of gradients scaled to a norm of at most ``clip``."""
    squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    scale = (clip / norms.clamp(min=1e-12)).clamp(max=1) / len(norms)
    return {name: torch.tensordot(scale, g, 1) for name, g in gradients.items()}


def train(
    params: Params, images: Tensor, labels: Tensor, epochs: int, batch: int, clip: float
) -> Iterator[None]:
    """Train ``params`` in place, with every block as a remat region; yields after each step.

    Images at the end of a pass that do not fill a batch are left out.
    """
    gradients = per_example_gradients(functx.remat(block))
    optimizer = torch.optim.AdamW(list(params.values()), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 4e-3, epochs * (len(images) // batch), pct_start=0.2
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator).to(images.device)
        for rows in order[: len(order) // batch * batch].split(batch):
            mean = clipped_mean(gradients(params, images[rows], labels[rows]), clip)
            for name, param in params.items():
                param.grad = mean[name]
            optimizer.step()
            schedule.step()
            yield


def accuracy(params: Params, images: Tensor, labels: Tensor) -> float:
    """The fraction of ``images`` that are classified correctly."""
    with torch.no_grad():
        scores = functx.vmap(logits, in_dims=(None, 0))(params, images)
    return (scores.argmax(1) == labels).float().mean().item()
