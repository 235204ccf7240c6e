"""Claim: clipped sums of per-example gradients take the least memory of all, in less time.

The sum over a batch of gradients clipped to norm 1, five problems, by every way there is. Time and
peak are relative to ``torch.func.vmap(torch.func.grad(loss))`` and a weighted sum of what it gives.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import functx
from bench._common import Column, Result, device_argument, environment, installed, median_seconds
from bench._per_sample_models import Workload, workloads
from functx import memory, per_sample

NAME = "per_sample"
CLAIM = "Clipped sums of per-example gradients: time / peak, relative to torch's vmap(grad)"
CHUNK, REPEATS = 4, 5
COMPILED = f"functx, chunk_size={CHUNK}, compile=True"
Run = Callable[[], Any]


def scale(norms: torch.Tensor) -> torch.Tensor:
    return (1 / norms.clamp_min(1e-12)).clamp(max=1)


def clipped(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The sum of gradients that are all there."""
    squares = [g.flatten(1).square().sum(1) for g in gradients.values()]
    factors = scale(torch.stack(squares).sum(0).sqrt())
    return {name: torch.tensordot(factors, g, 1) for name, g in gradients.items()}


def torch_vmap(work: Workload, chunk_size: int | None = None) -> Run:
    loss, params = work.loss_of_one()
    gradient = torch.func.grad(loss)
    each = torch.func.vmap(gradient, (None, 0, 0), chunk_size=chunk_size)
    return lambda: clipped(each(params, work.x, work.y))


def torch_loop(work: Workload) -> Run:
    loss, params = work.loss_of_one()
    gradient = torch.func.grad(loss)

    def run() -> dict[str, torch.Tensor]:
        total = {name: torch.zeros_like(param) for name, param in params.items()}
        for x, y in zip(work.x, work.y):
            gradients = gradient(params, x, y)
            squares = [g.square().sum() for g in gradients.values()]
            factor = scale(torch.stack(squares).sum().sqrt())
            for name in total:
                total[name] += factor * gradients.pop(name)
        return total

    return run


def opacus_hooks(work: Workload) -> Run:
    from opacus.grad_sample import GradSampleModule

    model = GradSampleModule(work.make().to(work.x.device), loss_reduction="sum")

    def run() -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            work.losses(model(work.x)).sum().backward()
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        total = clipped({name: param.grad_sample for name, param in named})
        model.zero_grad()
        return total

    return run


def opacus_ghost(work: Workload) -> Run:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        work.make().to(work.x.device), loss_reduction="sum", max_grad_norm=1.0
    )

    def run() -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            losses = work.losses(model(work.x))
            losses.sum().backward(retain_graph=True)
            model.zero_grad()
            factors = scale(model.get_norm_sample())
            model.disable_hooks()
            (factors * losses).sum().backward()
            model.enable_hooks()
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        total = {name: param.grad for name, param in named}
        for _, param in named:
            param.grad = None  # zero_grad would write zeros into the result
        return total

    return run


def ours(work: Workload, remat: bool = False, **options: Any) -> Run:
    loss, params = work.loss_of_one(remat)
    f = per_sample.clipped_sum(loss, max_norm=1.0, **options)
    return functools.partial(f, params, work.x, work.y)


TORCH_WAYS: list[tuple[str, Callable[[Workload], Run]]] = [
    ("torch vmap(grad)", torch_vmap),
    ("torch, loop over examples", torch_loop),
    (f"torch vmap, chunk_size={CHUNK}", functools.partial(torch_vmap, chunk_size=CHUNK)),
    ("Opacus hooks", opacus_hooks),
    ("Opacus ghost clipping", opacus_ghost),
    ("functx", ours),
    ("functx, chunk_size=8", functools.partial(ours, chunk_size=8)),
    (f"functx, chunk_size={CHUNK}", functools.partial(ours, chunk_size=CHUNK)),
    (COMPILED, functools.partial(ours, chunk_size=CHUNK, compile=True)),
    ("functx, chunk_size=2", functools.partial(ours, chunk_size=2)),
    ("functx, chunk_size=1", functools.partial(ours, chunk_size=1)),
    ("functx, remat", functools.partial(ours, remat=True)),
    (
        f"functx, remat, chunk_size={CHUNK}",
        functools.partial(ours, remat=True, chunk_size=CHUNK),
    ),
]


JAX_WAYS = ["jax jit(vmap(grad))", "jax with checkpoint, barriers kept"]


def jax_ways(work: Workload, numbers: Sequence[int] = (0, 1)) -> list[tuple[str, int, Run]]:
    """The same functions lowered to JAX; the peak is XLA's temporary memory with the results."""
    import jax
    import jax.numpy as jnp

    from functx.compat import _jax, to_jax

    def sum_of(gradients: Any) -> Any:
        squares = [jnp.square(g).reshape(len(g), -1).sum(1) for g in gradients.values()]
        norms = jnp.sqrt(sum(squares))
        factors = jnp.minimum(1, 1 / jnp.maximum(norms, 1e-12))
        return {name: jnp.tensordot(factors, g, 1) for name, g in gradients.items()}

    found = []
    for number in numbers:
        name, remat, options = JAX_WAYS[number], bool(number), (None, _jax.KEEP_RECOMPUTE)[number]
        loss, params = work.loss_of_one(remat)
        each = jax.vmap(jax.grad(to_jax(loss)), in_axes=(None, 0, 0))
        args = jax.tree.map(lambda t: jnp.asarray(t.cpu().numpy()), (params, work.x, work.y))

        def program(params: Any, x: Any, y: Any, each: Any = each) -> Any:
            return sum_of(each(params, x, y))

        lowered = jax.jit(program).lower(*args)
        compiled = lowered.compile(
            compiler_options=options if jax.default_backend() == "cpu" else None
        )
        stats = compiled.memory_analysis()
        peak = stats.temp_size_in_bytes + stats.output_size_in_bytes
        run = functools.partial(_wait, jax.block_until_ready, compiled, args)
        found.append((name, peak, run))
    return found


def jax_privacy_way(work: Workload) -> tuple[str, int, Run]:
    """jax_privacy's sum of clipped gradients, in microbatches."""
    import jax
    import jax.numpy as jnp
    from jax_privacy.clipping import clipped_grad

    from functx.compat import to_jax

    loss, params = work.loss_of_one()
    lowered_loss = to_jax(loss)

    def of_one(params: Any, x: Any, y: Any) -> Any:
        return lowered_loss(params, x[0], y[0])

    args = jax.tree.map(lambda t: jnp.asarray(t.cpu().numpy()), (params, work.x, work.y))
    f = clipped_grad(
        of_one, l2_clip_norm=1.0, batch_argnums=(1, 2), keep_batch_dim=True, microbatch_size=CHUNK
    )
    compiled = jax.jit(f).lower(*args).compile()
    stats = compiled.memory_analysis()
    peak = stats.temp_size_in_bytes + stats.output_size_in_bytes
    run = functools.partial(_wait, jax.block_until_ready, compiled, args)
    return f"jax_privacy.clipped_grad, microbatch {CHUNK}", peak, run


def _wait(until_ready: Any, run: Any, args: Any) -> Any:
    return until_ready(run(*args))


def allocated_peak(run: Run) -> int:
    """As `memory.peak`, of code that torch does not dispatch operation by operation."""
    if torch.cuda.is_initialized():
        return memory.peak(run)  # which asks the device
    with torch.profiler.profile(profile_memory=True) as profile, warnings.catch_warnings():
        run()
    found: Any = profile.profiler
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure(work: Workload, rows: dict[str, dict[str, Any]], device: torch.device) -> None:
    """Fill in what all ways take for one problem, next to each other in one run."""
    runs: dict[str, Run] = {}
    peaks: dict[str, int] = {}
    reference: dict[str, torch.Tensor] = {}
    for name, make in TORCH_WAYS:
        try:
            run = make(work)
            with torch.no_grad():
                total = {key.removeprefix("_module."): value for key, value in run().items()}
        except ImportError as error:
            rows[name]["error"] = str(error)
            continue
        reference = reference or total
        for key, value in total.items():  # a fast wrong way would not be worth a row
            torch.testing.assert_close(value, reference[key], rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            run()  # what is found out or compiled at the first calls is no part of the others
            peaks[name] = allocated_peak(run) if name == COMPILED else memory.peak(run)
        runs[name] = torch.no_grad()(run)
    try:
        for name, peak, run in [*jax_ways(work), jax_privacy_way(work)]:
            peaks[name], runs[name] = peak, run
    except ImportError as error:
        rows[f"jax_privacy.clipped_grad, microbatch {CHUNK}"]["error"] = str(error)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds = median_seconds(list(runs.values()), REPEATS, clock, device)
    base, base_peak = seconds[0], peaks["torch vmap(grad)"]
    for (name, _), one in zip(runs.items(), seconds):
        row = rows[name]
        row[work.name] = f"{one / base:.2f} / {peaks[name] / base_peak:.3f}"
        row.setdefault("seconds", {})[work.name] = one
        row.setdefault("peak", {})[work.name] = peaks[name]
    rows["torch vmap(grad)"][work.name] = f"{base * 1e3:.0f} ms / {base_peak / 2**20:.1f} MiB"


def one_core() -> None:
    """Give torch and JAX the same: one core, and its time, whoever else is at work."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def run(device: torch.device) -> Result:
    if device.type == "cpu":
        one_core()
    names = [name for name, _ in TORCH_WAYS]
    names[5:5] = [*JAX_WAYS, f"jax_privacy.clipped_grad, microbatch {CHUNK}"]
    rows: dict[str, dict[str, Any]] = {name: {"method": name} for name in names}
    problems = workloads(device)
    for work in problems:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Opacus, about hooks
            measure(work, rows, device)
    columns = [Column("method", "method"), *(Column(work.name, work.name) for work in problems)]
    notes = [
        "A cell: time / peak over those of torch's vmap(grad); first row: what those are.",
        "remat: every block is a region. CPU time, on one core for all.",
    ]
    versions = environment(device, *installed("opacus", "jax", "jax_privacy"))
    return Result(NAME, CLAIM + ".", columns, list(rows.values()), notes, versions)


def main() -> None:
    assert functx.per_sample is per_sample
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()


if __name__ == "__main__":
    main()
