"""Claim: remat of each block costs a transformer the time of the kernels that run again.

12 blocks, width 256, 8 examples of 128 tokens, forward and backward. A replay leaves out the last
product of a block, which no pullback reads. "by hand" is what that takes at least: boundaries kept,
and each block but its last product run again, written out. CPU time of one thread, in turns, to the
same without regions: as the C library comes, whose page faults are there or not by what ran before,
and where it keeps the memory that a program lets go of.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import functx
from bench._blocks import REGIONS, Stack, loss, stacks
from bench._common import (
    Column,
    Result,
    device_argument,
    environment,
    keep_freed_memory,
    least_seconds,
    one_thread,
    ratios,
)

NAME = "transformer"
CLAIM = "Time of gradients of a transformer of 12 blocks (width 256, T 128, B 8), a region each"
REPEATS = 5


def by_hand(stack: Stack) -> list[torch.Tensor]:
    """Gradients of the parameters, with no machinery but a tape for each block."""
    boundaries = [stack.x]
    with torch.no_grad():
        for block in stack.blocks:
            boundaries.append(block(boundaries[-1]))
    y = boundaries.pop()
    cotangent = y * (2 / y.numel())
    gradients: list[list[torch.Tensor]] = []
    for block in reversed(stack.blocks):
        x = boundaries.pop().requires_grad_(len(boundaries) > 0)
        last = block.down
        before = [p for p in block.parameters() if p is not last.weight and p is not last.bias]
        attended = block.attended(x)
        hidden = block.hidden(attended)
        rows = cotangent.reshape(-1, cotangent.shape[-1])
        own = [rows.t() @ hidden.detach().reshape(-1, hidden.shape[-1]), rows.sum(0)]
        inputs = [*before, x] if x.requires_grad else before
        cotangents = [cotangent, (rows @ last.weight.detach()).view(hidden.shape)]
        found = torch.autograd.grad([attended, hidden], inputs, cotangents)
        gradients.append([*found[: len(before)], *own])
        cotangent = found[-1]
    return [g for those in reversed(gradients) for g in those]


def _measure(
    rows: list[dict[str, Any]],
    key: str,
    runs: Sequence[Callable[[], Any]],
    clock: Callable[[], float],
    device: torch.device,
) -> None:
    for row, seconds in zip(rows, least_seconds(runs, REPEATS, clock, device)):
        row[key] = seconds
    batch = sum(row["program"] == "gradient of the batch" for row in rows)
    ratios(rows[:batch], key, rows[0])
    ratios(rows[batch:], key, rows[batch + 1])


@one_thread()
def run(device: torch.device) -> Result:
    stack = stacks(device)[1]
    block = stack.blocks[0]
    params = [{n: p.detach() for n, p in b.named_parameters()} for b in stack.blocks]

    def autograd(region: Any) -> Any:
        blocks = [region(block) for block in stack.blocks]
        return torch.autograd.grad(loss(blocks, stack.x), stack.parameters)

    def per_example(library: Any, region: Any) -> Any:
        one = region(lambda own, x: functx.functional_call(block, own, (x,)))

        def of_example(params: Any, x: torch.Tensor) -> torch.Tensor:
            return loss([lambda x, own=own: one(own, x) for own in params], x[None])

        return library.vmap(library.grad(of_example), (None, 0))(params, stack.x)

    runs: dict[tuple[str, str, str], Callable[[], Any]] = {
        ("gradient of the batch", "torch.autograd", regions): functools.partial(autograd, region)
        for regions, region in REGIONS.items()
    }
    runs["gradient of the batch", "torch.autograd", "by hand"] = functools.partial(by_hand, stack)
    for library, name in ((torch.func, "torch.func"), (functx, "functx")):
        for regions in ("-", "functx.remat") if library is functx else ("-",):
            call = functools.partial(per_example, library, REGIONS[regions])
            runs["vmap(grad)", name, regions] = call
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    rows: list[dict[str, Any]] = [
        {"program": program, "library": library, "regions": regions}
        for program, library, regions in runs
    ]
    _measure(rows, "seconds", list(runs.values()), clock, device)
    columns = [
        Column("program", "program"),
        Column("library", "library"),
        Column("regions", "regions by"),
        Column("seconds", "CPU time, ms", ".0f", 1e-3),
        Column("seconds_ratio", "to no regions", ".2f"),
    ]
    if device.type == "cpu" and keep_freed_memory():
        _measure(rows, "kept_seconds", list(runs.values()), clock, device)
        columns += [
            Column("kept_seconds", "freed memory kept, ms", ".0f", 1e-3),
            Column("kept_seconds_ratio", "to no regions", ".2f"),
        ]
    return Result(NAME, CLAIM + ".", columns, rows, [], environment(device))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
