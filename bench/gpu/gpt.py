"""Claim: regions train a GPT in the memory of jax.checkpoint, in little more time than plain.

12 blocks of width 768, 1,024 tokens, products in bfloat16; the batch fills most of the card without
recomputation. A step is a forward pass, a backward pass and a step of gradient descent.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from bench._common import Column, Result, environment, installed, ratios
from bench.gpu._torch_gpt import WAYS, measured
from bench.gpu._variants import Arguments, Runner, Setting, Variant, arguments, errors

NAME = "gpt"
CLAIM = "A step of training: GPT of 12 blocks, width 768, 1,024 tokens, products in bfloat16"
SECONDS = 200.0
FILLS = 0.8  # of the memory, by the batch without recomputation
FIND = "the batch"


def batch(setting: Setting) -> dict[str, Any]:
    """The largest batch, in fours, that fills no more than a part of the memory."""
    if setting.toy:
        return {"batch": 8}
    small, large = (measured("plain", size, False, setting.device, 1)["peak"] for size in (4, 8))
    total = torch.cuda.get_device_properties(0).total_memory
    size = int((FILLS * total - small) // ((large - small) // 4)) + 4
    return {"batch": max(4, size // 4 * 4), "memory": total}


def in_torch(setting: Setting, way: str) -> dict[str, Any]:
    return measured(way, setting.given["batch"], setting.toy, setting.device)


def in_jax(setting: Setting, checkpoint: bool) -> dict[str, Any]:
    from bench.gpu import _jax_gpt

    return _jax_gpt.measured(checkpoint, setting.given["batch"], setting.toy)


VARIANTS: dict[str, Variant] = {
    FIND: batch,
    **{way: functools.partial(in_torch, way=way) for way in WAYS},
    "JAX (jit), jax.checkpoint": functools.partial(in_jax, checkpoint=True),
    "JAX (jit)": functools.partial(in_jax, checkpoint=False),
}

COLUMNS = [
    Column("way", "blocks"),
    Column("batch", "batch", ".0f"),
    Column("peak", "peak, GiB", ".2f", 2**30),
    Column("peak_ratio", "to plain", ".2f"),
    Column("seconds", "time, ms", ".0f", 1e-3),
    Column("seconds_ratio", "to plain", ".2f"),
    Column("tokens_per_second", "tokens/s", ",.0f"),
]


def result(rows: list[dict[str, Any]], device: torch.device) -> Result:
    """The table of the rows that there are."""
    for key in ("peak", "seconds"):
        ratios(rows, key, rows[0])
    versions = environment(device, *installed("jax"))
    return Result(NAME, CLAIM + ".", COLUMNS, rows, errors(rows, "way"), versions)


def run(found: Arguments) -> Result:
    """Measure all variants, and write each down as it comes."""
    runner = Runner("bench.gpu.gpt", VARIANTS, found)
    size = runner.run(FIND)
    rows: list[dict[str, Any]] = []
    for way in VARIANTS:
        if way == FIND:
            continue
        figures = runner.run(way, batch=size["batch"]) if "batch" in size else dict(size)
        rows.append({"way": way, **figures})
        found.write(result(rows, runner.device))
    return result(rows, runner.device)


if __name__ == "__main__":
    parsed = arguments(NAME, CLAIM, SECONDS)
    run(parsed).show()
