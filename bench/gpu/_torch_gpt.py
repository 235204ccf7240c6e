"""The language model that the GPU benches train, in torch: 12 blocks of width 768, T 1024."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import functx
from bench._common import device_seconds
from bench._transformer import Transformer
from functx import checkpoint_policies, memory

SHAPE = {"tokens": 1024, "layers": 12, "width": 768, "vocabulary": 4096, "heads": 12}
TOY = {"tokens": 64, "layers": 4, "width": 32, "vocabulary": 64, "heads": 2}
RATE = 0.1

Prepare = Callable[[Transformer, torch.Tensor], None]


def shape(toy: bool) -> dict[str, int]:
    return TOY if toy else SHAPE


def model_of(toy: bool, device: str, **options: Any) -> Transformer:
    """The model, with the same numbers at each call."""
    torch.manual_seed(0)
    return Transformer(**shape(toy), fused=True, **options).to(device)


def batch_of(size: int, toy: bool, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and those that follow them, ``(size, tokens)`` both."""
    generator = torch.Generator().manual_seed(1)
    sizes = shape(toy)
    text = torch.randint(sizes["vocabulary"], (size, sizes["tokens"] + 1), generator=generator)
    text = text.to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_of(model: Transformer, x: torch.Tensor, y: torch.Tensor, half: bool) -> torch.Tensor:
    """The mean loss; ``half`` computes products in bfloat16."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def step_of(model: Transformer, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A step of training: gradients, and a step down along them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        loss_of(model, x, y, half=True).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# --- ways to recompute -------------------------------------------------------------------------


def as_it_is(model: Transformer, x: torch.Tensor) -> None:
    """All activations are kept."""


def torch_checkpoint(model: Transformer, x: torch.Tensor) -> None:
    """Each block is one of torch's checkpoints."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    model.chain = chain


def remat(model: Transformer, x: torch.Tensor, policy: Any = None) -> None:
    """Each block is a region."""
    functx.apply_remat(model, "blocks.*", policy=policy)


def on_budget(model: Transformer, x: torch.Tensor, share: float) -> None:
    """The blocks are cut so that they take a share of the memory; planned for part of the batch."""
    few = x[: max(8, len(x) // 4)]
    width = model.head.in_features
    start = torch.zeros(*few.shape, width, device=x.device, requires_grad=True)
    with torch.autocast(x.device.type, torch.bfloat16):
        plan = functx.plan(model.blocks, start, budget=share)
    model.chain = plan.apply(model.blocks)


KEPT = checkpoint_policies.save_only_these_names("attention")

WAYS: dict[str, Prepare] = {
    "plain": as_it_is,
    "torch.utils.checkpoint": torch_checkpoint,
    "functx.remat": remat,
    "functx, budget 50 %": functools.partial(on_budget, share=0.5),
    "functx, budget 25 %": functools.partial(on_budget, share=0.25),
    "functx.remat, attention kept": functools.partial(remat, policy=KEPT),
    "functx.remat, attention in host memory": functools.partial(
        remat, policy=checkpoint_policies.offload(KEPT)
    ),
}


def measured(way: str, size: int, toy: bool, device: str, repeats: int = 5) -> dict[str, Any]:
    """Peak bytes, seconds and tokens a second of a step of training.

    On CUDA the peak is the allocator's, parameters and all; on the CPU that of the storages.
    """
    model = model_of(toy, device)
    x, y = batch_of(size, toy, device)
    WAYS[way](model, x)
    step = step_of(model, x, y)
    if device == "cuda":
        seconds = device_seconds(step, repeats, device)
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        seconds = device_seconds(step, 1, device)
        peak = memory.peak(step) + sum(p.nbytes for p in model.parameters()) + x.nbytes + y.nbytes
    return {
        "batch": size,
        "peak": peak,
        "seconds": seconds,
        "tokens_per_second": x.numel() / seconds,
    }
