"""Measure the memory and time of each way to compute the same per-example gradients.

``kept`` are the bytes that the pullback of the losses saves, without parameters and data. The peak
is that of a whole call. In torch both are measured storage by storage. In JAX, ``kept`` are the
bytes of the residuals, and the peak is the temporary memory of the compiled program plus its
results.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch.utils.checkpoint import checkpoint

import functx
from functx import compat, memory
from functx._cli.demo import training
from functx._cli.demo.training import Block, block

Row = dict[str, Any]
Batch = tuple[training.Params, torch.Tensor, torch.Tensor]


def torch_rows(batch: Batch, repeats: int = 5) -> list[Row]:
    """torch.func and functx, each without and with recomputed blocks."""
    name, other = "torch.utils.checkpoint", partial(checkpoint, block, use_reentrant=False)
    try:
        checkpointed = _in_torch(name, torch.func, other, batch, repeats)
    except RuntimeError as error:
        checkpointed = _row("torch.func", name, error=str(error).partition("\n")[0])
    return [
        _in_torch("no", torch.func, block, batch, repeats),
        checkpointed,
        _in_torch("no", functx, block, batch, repeats),
        _in_torch("functx.remat", functx, functx.remat(block), batch, repeats),
    ]


def _row(
    library: str, remat: str, kept: int | None = None, peak: int | None = None, **others: Any
) -> Row:
    figures = {"kept_bytes": kept, "peak_bytes": peak, "seconds": None, "error": None}
    return {"library": library, "remat": remat, **figures, **others}


def _in_torch(remat: str, library: Any, block: Block, batch: Batch, repeats: int) -> Row:
    params, images, labels = batch
    losses = library.vmap(partial(training.loss, block=block), in_dims=(None, 0, 0))
    forward = memory.profile(library.vjp, lambda p: losses(p, images, labels), params)
    gradients = training.per_example_gradients(block, library)
    whole = memory.profile(gradients, *batch)

    def run() -> None:
        gradients(*batch)
        if images.is_cuda:
            torch.cuda.synchronize()

    figures = {"seconds": _median_seconds(run, repeats), "profile": whole}
    return _row(library.__name__, remat, forward.kept, whole.peak, **figures)


def jax_rows(batch: Batch, repeats: int = 5) -> list[Row]:
    """The same functions lowered to JAX and compiled, without and with recomputed blocks."""
    ways = {"no": block, "jax.checkpoint": functx.remat(block)}
    return [_in_jax(remat, block, batch, repeats) for remat, block in ways.items()]


def _in_jax(remat: str, block: Block, batch: Batch, repeats: int) -> Row:
    import jax
    import jax.numpy as jnp

    params, *data = jax.tree.map(lambda x: jnp.asarray(x.cpu().numpy()), batch)
    loss: Any = compat.to_jax(partial(training.loss, block=block))
    losses: Any = jax.vmap(loss, in_axes=(None, 0, 0))
    saved = functx.saved_residuals(lambda p: losses(p, *data), params)
    kept = sum(one.nbytes for one in saved if one.kind == "output")
    # By default XLA's CPU compiler merges the recomputation with the forward pass.
    on_cpu = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    options: Any = on_cpu if jax.default_backend() == "cpu" else None
    gradients: Any = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))
    compiled = gradients.lower(params, *data).compile(compiler_options=options)
    stats = compiled.memory_analysis()
    peak = stats.temp_size_in_bytes + stats.output_size_in_bytes
    seconds = _median_seconds(lambda: jax.block_until_ready(compiled(params, *data)), repeats)
    return _row("JAX (jit)", remat, kept, peak, seconds=seconds)


def crosscheck(batch: Batch) -> compat.Crosscheck:
    """Compare the batch's losses and gradients with JAX, on the CPU."""
    params, images, labels = batch
    return compat.crosscheck(
        partial(training.loss, block=functx.remat(block)),
        {name: param.cpu() for name, param in params.items()},
        *(images.cpu(), labels.cpu()),
        in_dims=(None, 0, 0),
        name="the loss of the digits' transformer",
    )


def _median_seconds(run: Callable[[], Any], repeats: int) -> float:
    # The first run is a warm-up.
    return statistics.median(timeit.repeat(run, number=1, repeat=repeats + 1)[1:])


def table(rows: list[Row]) -> Table:
    """The rows as a table, with bytes in MiB, and ratios of peak and time to the first row."""
    found = Table("library", "blocks under", title="per-example gradients of one batch")
    found.title_justify = "left"
    for name in ("kept, MiB", "peak, MiB", "ratio", "time, ms", "ratio"):
        found.add_column(name, justify="right")
    for row in rows:
        cells = ["error", "error"]
        if row["error"] is None:
            kept, peak, seconds = row["kept_bytes"], row["peak_bytes"], row["seconds"]
            more, longer = peak / rows[0]["peak_bytes"], seconds / rows[0]["seconds"]
            cells = [f"{kept / 2**20:.2f}", f"{peak / 2**20:.2f}", f"{more:.2f}"]
            cells += [f"{seconds * 1e3:.0f}", f"{longer:.2f}"]
        found.add_row(row["library"], row["remat"], *cells)
    return found
