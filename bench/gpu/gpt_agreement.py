"""Claim: gradients with regions are those without, as near to float64 as JAX's, from as few bytes.

The GPT of `bench.gpu.gpt` in float32 at full precision, two examples, by kernels that give the same
bits each time. The same loss is written by hand in JAX. Distances are norms of the differences of
all gradients, relative to the norm.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from bench._common import Column, Result, environment, installed
from bench.gpu import _torch_gpt
from bench.gpu._torch_gpt import WAYS
from bench.gpu._variants import (
    Arguments,
    Runner,
    Setting,
    Variant,
    arguments,
    errors,
    without_autotuning,
)
from functx import memory

NAME = "gpt_agreement"
CLAIM = "Gradients of the GPT in float32, two examples: distances, and bytes kept for the backward"
SECONDS = 90.0
BATCH = 2
IN_TORCH = ["plain", "torch.utils.checkpoint", "functx.remat"]

Gradients = dict[str, torch.Tensor]


def distance(one: Gradients, other: Gradients) -> float:
    """The norm of the difference, relative to that of ``other``."""
    apart = sum(
        float((one[n].double().cpu() - other[n].double().cpu()).square().sum()) for n in other
    )
    return float((apart / sum(float(g.double().square().sum()) for g in other.values())) ** 0.5)


def gradients(way: str, setting: Setting, dtype: torch.dtype) -> tuple[Gradients, int]:
    """Gradients by name, and the bytes that the forward pass leaves behind."""
    model = _torch_gpt.model_of(setting.toy, setting.device).to(dtype)
    x, y = _torch_gpt.batch_of(BATCH, setting.toy, setting.device)
    WAYS[way](model, x)
    forward = memory.profile(lambda: _torch_gpt.loss_of(model, x, y, half=False))
    names, parameters = zip(*model.named_parameters())
    found = torch.autograd.grad(forward.result, parameters)
    return dict(zip(names, found)), forward.kept


def agreement(setting: Setting) -> dict[str, Any]:
    """All ways in one process: two examples are small."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # else plain's bits are not plain's
    try:
        exact, _ = gradients("plain", setting, torch.float64)
        found = {way: gradients(way, setting, torch.float32) for way in IN_TORCH}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.use_deterministic_algorithms(False)
    same = [way for way in IN_TORCH[1:] if _equal(found[way][0], found["plain"][0])]
    without_autotuning()
    try:
        from bench.gpu import _jax_gpt
    except ImportError:
        ours = None
    else:
        for name, checkpoint in (("JAX", False), ("JAX, jax.checkpoint", True)):
            found[name] = _jax_gpt.gradients(BATCH, setting.toy, checkpoint)
        ours = found["JAX, jax.checkpoint"][0]
    rows = [
        {
            "way": way,
            "kept": kept,
            "to_float64": distance(one, exact),
            "to_jax": None if ours is None or one is ours else distance(one, ours),
            "same": "yes" if way in same else "-",
        }
        for way, (one, kept) in found.items()
    ]
    return {"rows": rows}


def _equal(one: Gradients, other: Gradients) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


VARIANTS: dict[str, Variant] = {"agreement": agreement}

COLUMNS = [
    Column("way", "blocks"),
    Column("kept", "kept, MiB", ".2f", 2**20),
    Column("to_float64", "from float64", ".1e"),
    Column("to_jax", "from JAX", ".1e"),
    Column("same", "plain's bits"),
]


def run(found: Arguments) -> Result:
    """Compare, and write it down."""
    runner = Runner("bench.gpu.gpt_agreement", VARIANTS, found)
    figures = runner.run("agreement")
    rows = figures.get("rows") or [{"way": "all", **figures}]
    versions = environment(runner.device, *installed("jax"))
    result = Result(NAME, CLAIM + ".", COLUMNS, rows, errors(rows, "way"), versions)
    found.write(result)
    return result


if __name__ == "__main__":
    parsed = arguments(NAME, CLAIM, SECONDS)
    run(parsed).show()
