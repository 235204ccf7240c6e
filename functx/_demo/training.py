"""Training with per-example clipped gradients, as differentially private SGD does (without noise).

Every example has its own gradient, scaled down to a norm of at most ``clip`` before the mean: no
single image moves the parameters far. Abadi et al., Deep learning with differential privacy, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import functx
from functx._demo import model
from functx._demo.data import Digits
from functx._demo.model import Block, Params, Size

PerExample = Callable[[Params, torch.Tensor, torch.Tensor], Params]


def per_example_gradients(size: Size, block: Block) -> PerExample:
    """A function of (params, images, labels) that returns one gradient an image.

    Each leaf of its result has the shape of the parameter, behind the batch dimension.
    """

    def loss(params: Params, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return model.loss(params, image, label, size, block)

    return functx.vmap(functx.grad(loss), in_dims=(None, 0, 0))


def clipped_mean(gradients: Params, clip: float) -> Params:
    """The mean over the batch of gradients scaled to a norm of at most ``clip``."""
    squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    scale = (clip / norms.clamp(min=1e-12)).clamp(max=1) / len(norms)
    return {name: torch.tensordot(scale, g, 1) for name, g in gradients.items()}


def train(
    params: Params,
    digits: Digits,
    per_example: PerExample,
    *,
    epochs: int,
    batch: int,
    rate: float,
    clip: float,
    seed: int = 0,
) -> Iterator[int]:
    """Train ``params`` in place with AdamW under a one-cycle schedule.

    Args:
        params: The parameters, changed at every step.
        digits: The data.
        per_example: As `per_example_gradients` returns.
        epochs: Passes over the data; the remainder of a pass that fills no batch is left out.
        batch: Images a step.
        rate: The highest learning rate.
        clip: The largest norm of one image's gradient.
        seed: Decides the order of the images.

    Yields:
        The number of steps done, after each.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(list(params.values()), lr=rate)
    total = steps(digits, epochs, batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total, pct_start=0.2)
    images, labels = digits.train_images, digits.train_labels
    done = 0
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator).to(images.device)
        for rows in order[: len(order) // batch * batch].split(batch):
            gradients = clipped_mean(per_example(params, images[rows], labels[rows]), clip)
            for name, param in params.items():
                param.grad = gradients[name]
            optimizer.step()
            schedule.step()
            done += 1
            yield done


def steps(digits: Digits, epochs: int, batch: int) -> int:
    """How many steps `train` takes."""
    return len(digits.train_images) // batch * epochs


def accuracy(params: Params, size: Size, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The fraction of ``images`` whose highest score is at their label."""
    with torch.no_grad():
        scores = functx.vmap(lambda image: model.logits(params, image, size))(images)
    return (scores.argmax(1) == labels).float().mean().item()
