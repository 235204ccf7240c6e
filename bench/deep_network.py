"""Claim: remat under transforms keeps a deep network's gradients small, and lean grad halves them.

A 24-layer MLP on 16 examples of 1,024 tokens; one activation is 16 * 1024 * 64 float32 numbers,
4 MiB. Regions of 4 layers. Three programs: the gradient of the whole batch, and per-example
gradients of the parameters and of the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import functx
from bench._common import Column, Result, device_argument, environment, median_seconds, ratios
from functx import memory

NAME = "deep_network"
CLAIM = "Gradients of a 24-layer MLP, regions of 4 layers; an activation is 4 MiB"
LAYERS, EVERY = 24, 4
EXAMPLES, TOKENS, WIDTH = 16, 1024, 64
ACTIVATION = EXAMPLES * TOKENS * WIDTH * 4

Region = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]
PROGRAMS = {
    "batch": "grad, batch",
    "per_example": "vmap(grad), parameters",
    "inputs": "vmap(grad), inputs",
}


def segment(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def loss_with(region: Region) -> Callable[..., torch.Tensor]:
    run = region(segment)

    def loss(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for start in range(0, LAYERS, EVERY):
            x = run(weights[start : start + EVERY], x)
        return x.square().sum()

    return loss


def plain(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return f


def torch_checkpoint(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: checkpoint(f, *args, use_reentrant=False)


def autograd(loss: Callable[..., torch.Tensor], program: str) -> Callable[..., Any]:
    """The base level: no transform, so the batch's gradient only."""

    def gradient(weights: list[torch.Tensor], x: torch.Tensor) -> Any:
        if program != "batch":
            raise RuntimeError("no per-example gradients without a transform")
        leaves = [w.detach().requires_grad_() for w in weights]
        return torch.autograd.grad(loss(leaves, x), leaves)

    return gradient


def transformed(vmap: Any, grad: Any) -> Callable[..., Any]:
    def make(loss: Callable[..., torch.Tensor], program: str) -> Callable[..., Any]:
        if program == "batch":
            return grad(loss)
        return vmap(grad(loss, argnums=int(program == "inputs")), in_dims=(None, 0))

    return make


@dataclass
class Way:
    """One way to get the gradients of one program: its row of the table, and how to run it."""

    row: dict[str, Any]
    call: Callable[[], Any]


def torch_ways(program: str, device: torch.device) -> list[Way]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) / 8 for _ in range(LAYERS)]
    weights = [weight.to(device) for weight in weights]
    x = torch.randn(EXAMPLES, TOKENS, WIDTH, generator=generator).to(device)
    torch_func = transformed(torch.func.vmap, torch.func.grad)
    with_functx = transformed(functx.vmap, functx.grad)
    found: list[tuple[str, str, Any, Region]] = [
        ("torch.func", "-", torch_func, plain),
        ("torch.func", "torch.utils.checkpoint", torch_func, torch_checkpoint),
        ("torch.autograd", "-", autograd, plain),
        ("torch.autograd", "torch.utils.checkpoint", autograd, torch_checkpoint),
        ("functx", "-", with_functx, plain),
        ("functx", "functx.remat", with_functx, functx.remat),
    ]
    ways = []
    for library, regions, make, region in found:
        if make is autograd and program != "batch":
            continue
        row: dict[str, Any] = {"library": library, "regions": regions}
        call = functools.partial(make(loss_with(region), program), weights, x)
        try:
            call()  # warm: a GPU library's workspace is not part of the claim
            row["peak"] = memory.peak(call)
        except RuntimeError as error:
            if region is not torch_checkpoint:
                raise
            row["error"] = str(error).partition(". ")[0]
        ways.append(Way(row, call))
    return ways


def jax_ways(program: str) -> list[Way]:
    """The same network written in JAX; the peak is XLA's temporary memory with the results."""
    import jax
    import jax.numpy as jnp

    from functx.compat import _jax

    def jax_segment(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    def gradient_of(region: Any) -> Any:
        def loss(weights: Any, x: Any) -> Any:
            for start in range(0, LAYERS, EVERY):
                x = region(jax_segment)(weights[start : start + EVERY], x)
            return jnp.square(x).sum()

        if program == "batch":
            return jax.grad(loss)
        return jax.vmap(jax.grad(loss, argnums=int(program == "inputs")), in_axes=(None, 0))

    key = jax.random.key(0)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for _ in range(LAYERS)]
    x = jax.random.normal(key, (EXAMPLES, TOKENS, WIDTH))
    found: list[tuple[str, Any, Any]] = [
        ("-", lambda f: f, None),
        ("jax.checkpoint", jax.checkpoint, None),
    ]
    if jax.default_backend() == "cpu":
        found.append(("jax.checkpoint, barriers kept", jax.checkpoint, _jax.KEEP_RECOMPUTE))
    ways = []
    for regions, region, options in found:
        lowered = jax.jit(gradient_of(region)).lower(weights, x)
        run: Any = lowered.compile(compiler_options=options)
        stats = run.memory_analysis()
        peak = stats.temp_size_in_bytes + stats.output_size_in_bytes
        row = {"library": "JAX (jit)", "regions": regions, "peak": peak}
        ways.append(Way(row, functools.partial(_wait, jax.block_until_ready, run, weights, x)))
    return ways


def _wait(until_ready: Any, run: Any, *args: Any) -> Any:
    return until_ready(run(*args))


def run(device: torch.device) -> Result:
    rows = []
    for program, title in PROGRAMS.items():
        ways = torch_ways(program, device) + jax_ways(program)
        works = [way for way in ways if "error" not in way.row]
        seconds = median_seconds([way.call for way in works], device=device)
        for way, one in zip(works, seconds):
            way.row["seconds"] = one
        same = [{"program": title} | way.row for way in ways]
        ratios(same, "seconds", same[0])
        rows += same
    for row in rows:
        if row.get("peak") is not None:
            row["activations"] = row["peak"] / ACTIVATION
    columns = [
        Column("program", "program"),
        Column("library", "library"),
        Column("regions", "regions by"),
        Column("activations", "peak, activations", ".1f"),
        Column("peak", "peak, MiB", ".1f", 2**20),
        Column("seconds", "time, ms", ".0f", 1e-3),
        Column("seconds_ratio", "time, to torch.func", ".2f"),
    ]
    errors = {row["error"] for row in rows if row.get("error")}
    notes = [f'error: "{error}".' for error in sorted(errors)]
    return Result(NAME, CLAIM + ".", columns, rows, notes, environment(device, "jax"))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
