"""What each way to the same per-example gradients keeps, peaks at and takes.

``kept`` is what the end of the forward pass has live, the loss aside: the tape, read off while the
gradient is computed, not from a separate forward. In JAX it is the leaves of the vjp that aren't
arguments, and the peak is XLA's temporary memory with the results: neither framework's figure is
derived from the other's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import functx
from functx import memory
from functx._demo import model
from functx._demo.model import Block, Params, Size


@dataclass(frozen=True)
class Row:
    """One way to compute per-example gradients of a batch.

    Attributes:
        library: What computes them.
        remat: How the blocks are recomputed, if they are.
        kept: Bytes live between forward and backward pass.
        peak: Most bytes live at once, the gradients among them.
        seconds: Median time of a call.
        error: Why there are no figures, if there are none.
        profile: The whole timeline, where torch ran it.
    """

    library: str
    remat: str
    kept: int | None = None
    peak: int | None = None
    seconds: float | None = None
    error: str | None = None
    profile: memory.Profile | None = field(default=None, repr=False, compare=False)


Batch = tuple[Params, torch.Tensor, torch.Tensor]


def torch_rows(size: Size, batch: Batch, repeats: int = 5) -> list[Row]:
    """torch.func and functx, each with and without recomputation of the blocks.

    Args:
        size: The network.
        batch: Its parameters, images (n, 64) and labels (n,).
        repeats: Timed calls of each.
    """

    def checkpointed(params: Params, x: torch.Tensor, heads: int) -> torch.Tensor:
        return checkpoint(model.block, params, x, heads, use_reentrant=False)

    ways: list[tuple[str, str, Any, Any, Block]] = [
        ("torch.func", "no", torch.func.vmap, torch.func.grad, model.block),
        ("torch.func", "torch.utils.checkpoint", torch.func.vmap, torch.func.grad, checkpointed),
        ("functx", "no", functx.vmap, functx.grad, model.block),
        ("functx", "functx.remat", functx.vmap, functx.grad, functx.remat(model.block)),
    ]
    rows = []
    for library, remat, vmap, grad, block in ways:

        def loss(
            params: Params, image: torch.Tensor, label: torch.Tensor, block: Block = block
        ) -> torch.Tensor:
            return model.loss(params, image, label, size, block)

        try:
            rows.append(_torch_row(library, remat, vmap, grad, loss, batch, repeats))
        except RuntimeError as error:
            if library != "torch.func" or remat == "no":
                raise
            rows.append(Row(library, remat, error=str(error).partition("\n")[0]))
    return rows


def _torch_row(
    library: str,
    remat: str,
    vmap: Any,
    grad: Any,
    loss: Callable[..., torch.Tensor],
    batch: Batch,
    repeats: int,
) -> Row:
    kept = []
    storages = memory.LiveStorages()

    def watched(*args: Any) -> torch.Tensor:
        out = loss(*args)
        kept.append(storages.live - storages.bytes_of([out]))
        return out

    with storages:
        vmap(grad(watched), in_dims=(None, 0, 0))(*batch)
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    profile = memory.profile(gradients, *batch)
    seconds = _median_seconds(lambda: gradients(*batch), batch[1].device, repeats)
    return Row(library, remat, kept[0], profile.peak, seconds, profile=profile)


def jax_rows(size: Size, batch: Batch, repeats: int = 5) -> list[Row]:
    """The same functions lowered to JAX, compiled, without and with remat regions.

    Args:
        size: The network.
        batch: Its parameters, images (n, 64) and labels (n,).
        repeats: Timed calls of each.

    Raises:
        ImportError: JAX is not installed.
    """
    import jax.numpy as jnp

    params, images, labels = batch
    arrays = (
        {name: jnp.asarray(param.detach().cpu().numpy()) for name, param in params.items()},
        jnp.asarray(images.cpu().numpy()),
        jnp.asarray(labels.cpu().numpy().astype("int32")),
    )
    rows = []
    for remat, block in (("no", model.block), ("jax.checkpoint", functx.remat(model.block))):

        def loss(
            params: Params, image: torch.Tensor, label: torch.Tensor, block: Block = block
        ) -> torch.Tensor:
            return model.loss(params, image, label, size, block)

        rows.append(_jax_row(remat, loss, arrays, repeats))
    return rows


def _jax_row(remat: str, loss: Callable[..., torch.Tensor], arrays: Any, repeats: int) -> Row:
    import jax

    from functx import compat
    from functx.compat import _jax

    lowered: Any = compat.to_jax(loss)
    batched: Any = jax.vmap(lowered, in_axes=(None, 0, 0))
    gradients: Any = jax.jit(jax.vmap(jax.grad(lowered), in_axes=(None, 0, 0)))
    options: Any = _jax.KEEP_RECOMPUTE if jax.default_backend() == "cpu" else None
    compiled: Any = gradients.lower(*arrays).compile(compiler_options=options)
    stats = compiled.memory_analysis()
    peak = stats.temp_size_in_bytes + stats.output_size_in_bytes
    seconds = _median_seconds(
        lambda: jax.block_until_ready(compiled(*arrays)), torch.device("cpu"), repeats
    )

    _, pullback = jax.vjp(lambda params: batched(params, *arrays[1:]), arrays[0])
    given = {_jax.buffer_pointer(leaf) for leaf in jax.tree.leaves(arrays)}
    leaves = {
        _jax.buffer_pointer(leaf): leaf.nbytes
        for leaf in jax.tree.leaves(pullback)
        if isinstance(leaf, jax.Array)
    }
    kept = sum(nbytes for pointer, nbytes in leaves.items() if pointer not in given)
    return Row("JAX (jit)", remat, kept, peak, seconds)


def _median_seconds(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median wall time of ``run``, once warm."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
