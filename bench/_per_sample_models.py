"""The networks of `bench.per_sample`: each takes a batch, and can have its blocks as regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import functx
from bench._transformer import Transformer


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, 512)]
    layers += [nn.Sequential(nn.GELU(), nn.Linear(512, 512)) for _ in range(7)]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def convolutional() -> nn.Module:
    def stage(inputs: int, outputs: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.ReLU())

    stages = [stage(3, 16, 1), stage(16, 32, 2), stage(32, 64, 2)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@dataclass
class Workload:
    """One problem: a network, a batch, and the loss of each of its examples.

    Attributes:
        name: As in the table.
        make: Makes the network, the same at each call.
        x: The batch.
        y: Its targets.
        regions: Where a module is a block, for regions.
    """

    name: str
    make: Callable[[], nn.Module]
    x: torch.Tensor
    y: torch.Tensor
    regions: Callable[[str], bool]

    def loss_of_one(self, remat: bool = False) -> tuple[Callable[..., torch.Tensor], Any]:
        """A function of parameters and one example, and the parameters."""
        model = self.make().to(self.x.device)
        if remat:
            functx.apply_remat(model, lambda name, module: self.regions(name))
        params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        frozen = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}

        def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scores = functx.functional_call(model, {**frozen, **params}, (x[None],))
            return F.cross_entropy(scores.flatten(0, -2), y[None].flatten())

        return loss, params

    def losses(self, scores: torch.Tensor) -> torch.Tensor:
        """The losses of all examples, from the scores of the batch."""
        losses = F.cross_entropy(scores.flatten(0, -2), self.y.flatten(), reduction="none")
        return losses.view(len(self.x), -1).mean(1)


def workloads(device: torch.device) -> list[Workload]:
    generator = torch.Generator().manual_seed(0)

    def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            torch.manual_seed(0)
            return make()

        return made

    def tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(256, (batch, length + 1), generator=generator).to(device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def images(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(*shape, generator=generator).to(device)
        return x, torch.randint(10, shape[:1], generator=generator).to(device)

    def first_only() -> nn.Module:
        model = Transformer(64).requires_grad_(False)
        model.blocks[0].requires_grad_(True)
        return model

    def is_block(name: str) -> bool:
        return name.startswith("blocks.") and name.count(".") == 1

    def is_stage(name: str) -> bool:
        return name in ("0", "1", "2", "3", "4", "5", "6", "7")

    return [
        Workload("MLP 8x512, B 64", seeded(mlp), *images(64, 64), is_stage),
        Workload("transformer 4x128, T 64, B 16", seeded(lambda: Transformer(64)),
                 *tokens(16, 64), is_block),
        Workload("T 256, B 8", seeded(lambda: Transformer(256)), *tokens(8, 256), is_block),
        Workload("T 64, first block trainable", seeded(first_only), *tokens(16, 64), is_block),
        Workload("conv net, 32x32, B 32", seeded(convolutional), *images(32, 3, 32, 32),
                 lambda name: name in ("0", "1", "2")),
    ]  # fmt: skip
