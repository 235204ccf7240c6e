"""Claim: in a given memory, regions train with larger batches.

The largest batch of the GPT of `bench.gpu.gpt` whose training step fits, found by trying: doubled
until it does not, then halved in between.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import Any

import torch

from bench._common import Column, Result, environment, installed, ratios, short_of_memory
from bench.gpu import _torch_gpt
from bench.gpu._torch_gpt import WAYS
from bench.gpu._variants import (
    Arguments,
    Runner,
    Setting,
    Variant,
    arguments,
    errors,
    so_far,
    without_autotuning,
)
from functx import memory

NAME = "gpt_batch"
LIMIT, TOY_LIMIT = 12 * 2**30, 5 * 2**20
CLAIM = f"The largest batch of the GPT whose training step fits in {LIMIT // 2**30} GiB"
SECONDS = 120.0
IN_TORCH = [
    "plain",
    "torch.utils.checkpoint",
    "functx.remat",
    "functx.remat, attention in host memory",
]


def largest(fits: Callable[[int], bool], start: int, note: Callable[[int], None]) -> int:
    """The largest number that fits, to one part in sixteen; 0 if none does.

    Args:
        fits: Whether a number does.
        start: Where to begin.
        note: Is told of each that does, as it is found.
    """
    low, high = 0, 0
    trial = start
    while not high or high - low > max(1, low // 16):
        if fits(trial):
            low = trial
            note(low)
        else:
            high = trial
        trial = (low + high) // 2 if high else 2 * low
        if not trial:
            return 0
    return low


def in_torch(setting: Setting, way: str) -> dict[str, Any]:
    """By running steps; on CUDA the allocator is given no more than the limit."""
    limit = TOY_LIMIT if setting.toy else LIMIT
    if setting.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)

    def fits(size: int) -> bool:
        try:
            return _fits(way, size, setting, limit)
        except RuntimeError as error:
            if not short_of_memory(error):
                raise
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
        return False

    return {"batch": largest(fits, 4, lambda size: so_far({"batch": size}))}


def _fits(way: str, size: int, setting: Setting, limit: int) -> bool:
    model = _torch_gpt.model_of(setting.toy, setting.device)
    x, y = _torch_gpt.batch_of(size, setting.toy, setting.device)
    WAYS[way](model, x)
    step = _torch_gpt.step_of(model, x, y)
    if setting.device == "cuda":
        step()
        torch.cuda.synchronize()
        return True
    return memory.peak(step) + sum(p.nbytes for p in model.parameters()) <= limit


def in_jax(setting: Setting, checkpoint: bool) -> dict[str, Any]:
    """By what the compiler says a step takes, which grows in a line; the last one also runs."""
    limit = TOY_LIMIT if setting.toy else LIMIT
    if setting.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(limit / total)
    without_autotuning()
    from bench.gpu import _jax_gpt

    def peak(size: int) -> int:
        compiled, _, _ = _jax_gpt.compiled_step(size, setting.toy, checkpoint)
        return _jax_gpt.planned_peak(compiled)

    one, two = peak(4), peak(8)
    each = max(1, (two - one) // 4)
    size = max(1, 4 + (limit - one) // each)
    while size:
        try:
            step, params, batch = _jax_gpt.compiled_step(size, setting.toy, checkpoint)
            over = _jax_gpt.planned_peak(step) - limit
            if over <= 0:
                _jax_gpt.finished(step(params, *batch))
                break
        except Exception as error:
            if not short_of_memory(error):
                raise
            over = size // 16 * each
        size -= min(size, max(1, -(-over // each)))
    return {"batch": size}


VARIANTS: dict[str, Variant] = {
    **{way: functools.partial(in_torch, way=way) for way in IN_TORCH},
    "JAX (jit)": functools.partial(in_jax, checkpoint=False),
    "JAX (jit), jax.checkpoint": functools.partial(in_jax, checkpoint=True),
}

COLUMNS = [
    Column("way", "blocks"),
    Column("batch", "largest batch", ".0f"),
    Column("batch_ratio", "to plain", ".2f"),
]


def result(rows: list[dict[str, Any]], device: torch.device) -> Result:
    """The table of the rows that there are."""
    ratios(rows, "batch", rows[0])
    versions = environment(device, *installed("jax"))
    return Result(NAME, CLAIM + ".", COLUMNS, rows, errors(rows, "way"), versions)


def run(found: Arguments) -> Result:
    """Search for all ways, and write each down as it comes."""
    runner = Runner("bench.gpu.gpt_batch", VARIANTS, found)
    rows: list[dict[str, Any]] = []
    for way in VARIANTS:
        rows.append({"way": way, **runner.run(way)})
        found.write(result(rows, runner.device))
    return result(rows, runner.device)


if __name__ == "__main__":
    parsed = arguments(NAME, CLAIM, SECONDS)
    run(parsed).show()
