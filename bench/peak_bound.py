"""Claim: with a region a block, memory is what it has to be.

While block ``k`` is pulled back, there have to be: what is between the blocks before it, the
residuals of one block, its result and the cotangent of that, and the gradients of the blocks from
``k`` on. The bound is the most of that over all ``k``; each term is measured by itself, on the
network without regions.
"""

from __future__ import annotations

from typing import Any

import torch

import functx
from bench._blocks import LAYERS, REGIONS, Stack, loss, stacks
from bench._common import Column, Result, device_argument, environment
from functx import memory

NAME = "peak_bound"
CLAIM = "Peak memory of a gradient, 12 blocks, a region each, against what it has to be, MiB"


def bound(stack: Stack) -> int:
    """The most bytes that have to be live at once."""
    block, gradients = stack.blocks[0], sum(p.nbytes for p in stack.parameters) // LAYERS
    x = stack.x.clone().requires_grad_()
    residuals = memory.profile(block, x)
    one = residuals.kept + residuals.returned + stack.activation
    return max(
        k * stack.activation + one + (LAYERS - k) * gradients  # k boundaries; x is the caller's
        for k in range(LAYERS)
    )


def autograd(stack: Stack, region: Any) -> Any:
    blocks = [region(block) for block in stack.blocks]
    return torch.autograd.grad(loss(blocks, stack.x), stack.parameters)


def transformed(stack: Stack, region: Any) -> Any:
    """Under `functx.grad`: the parameters are arguments of each block."""
    block = stack.blocks[0]
    run = region(lambda params, x: functx.functional_call(block, params, (x,)))
    params = [{n: p.detach() for n, p in b.named_parameters()} for b in stack.blocks]

    def of_parameters(params: Any) -> torch.Tensor:
        return loss([lambda x, own=own: run(own, x) for own in params], stack.x)

    with torch.no_grad():  # else torch takes formulas for backward that could be differentiated
        gradients = functx.grad(of_parameters)(params)
    return gradients


def run(device: torch.device) -> Result:
    rows = []
    for stack in stacks(device):
        row: dict[str, Any] = {"network": stack.name, "bound": bound(stack)}
        for name, region in REGIONS.items():
            row[name] = memory.peak(autograd, stack, region)
        row["grad"] = memory.peak(transformed, stack, functx.remat)
        row["ratio"] = row["functx.remat"] / row["bound"]
        rows.append(row)
    columns = [
        Column("network", "network"),
        Column("-", "no regions", ".1f", 2**20),
        Column("torch.utils.checkpoint", "torch.utils.checkpoint", ".1f", 2**20),
        Column("functx.remat", "functx.remat", ".1f", 2**20),
        Column("grad", "functx.remat, functx.grad", ".1f", 2**20),
        Column("bound", "bound", ".1f", 2**20),
        Column("ratio", "functx.remat, to bound", ".2f"),
    ]
    notes = [
        "Bound: boundaries, one block's residuals, result and cotangent, and the gradients so far, "
        "at the worst moment."
    ]
    return Result(NAME, CLAIM + ".", columns, rows, notes, environment(device))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
