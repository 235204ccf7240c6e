"""Claim: clipped sums of per-example gradients of a GPT, in less memory and time than elsewhere.

12 blocks of width 768, at 256 and 1,024 tokens, in float32 with TF32 products. Every way has a
process of its own and is held against a loop over examples in float64.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import per_sample
from bench._common import Column, Result, device_seconds, environment, installed, ratios
from bench._per_sample_models import Workload
from bench._transformer import Transformer
from bench.gpu._torch_gpt import SHAPE, TOY
from bench.gpu._variants import Arguments, Runner, Setting, Variant, arguments, errors
from functx import memory

NAME = "gpt_per_sample"
CLAIM = "Clipped sums of per-example gradients of the GPT, in float32 with TF32 products"
SECONDS = 150.0
LENGTHS = {256: 32, 1024: 8}  # tokens, and examples
TOY_LENGTHS = {16: 4}
REFERENCE = "float64, loop over examples"

ours = per_sample.ours
WAYS: dict[str, Callable[[Workload], per_sample.Run]] = {
    "torch vmap(grad)": per_sample.torch_vmap,
    "Opacus hooks": per_sample.opacus_hooks,
    "Opacus ghost clipping": per_sample.opacus_ghost,
    "functx": ours,
    "functx, compile=True": functools.partial(ours, compile=True),
    "functx, chunk_size=4": functools.partial(ours, chunk_size=4),
    "functx, chunk_size=1": functools.partial(ours, chunk_size=1),
    "functx, remat": functools.partial(ours, remat=True),
}


def work_of(length: int, setting: Setting, dtype: torch.dtype = torch.float32) -> Workload:
    """The problem at one number of tokens."""
    sizes = {**(TOY | {"layers": 2} if setting.toy else SHAPE), "tokens": length}
    size = (TOY_LENGTHS if setting.toy else LENGTHS)[length]
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(sizes["vocabulary"], (size, length + 1), generator=generator)
    text = text.to(setting.device)

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return Transformer(**sizes).to(dtype)

    return Workload(
        f"T {length}, B {size}",
        make,
        text[:, :-1].contiguous(),
        text[:, 1:].contiguous(),
        lambda name: name.startswith("blocks.") and name.count(".") == 1,
    )


def reference(setting: Setting, length: int) -> dict[str, Any]:
    """The sum in float64, left in a file."""
    work = work_of(length, setting, torch.float64)
    with torch.no_grad():
        total = per_sample.torch_loop(work)()
    torch.save({name: t.float().cpu() for name, t in total.items()}, setting.given["file"])
    return {}


def in_torch(setting: Setting, length: int, way: str) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = True
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # Opacus's hooks
    run = torch.no_grad()(WAYS[way](work_of(length, setting)))
    found = {name.removeprefix("_module."): t for name, t in run().items()}
    figures = {"distance": _distance(found, setting)}
    del found
    seconds = device_seconds(run, 3, setting.device)
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = memory.peak(run)
    return {**figures, "peak": peak, "seconds": seconds}


def in_jax(setting: Setting, length: int, number: int) -> dict[str, Any]:
    """The same function lowered to JAX."""
    import jax
    import numpy as np

    work = work_of(length, setting)
    [(_, planned, run)] = per_sample.jax_ways(work, [number])
    total = run()
    found = {name: torch.from_numpy(np.array(t)) for name, t in total.items()}
    figures = {"distance": _distance(found, setting), "planned_peak": planned}
    del total, found
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform == "gpu" else None
    peak = int(stats["peak_bytes_in_use"]) if stats else planned
    return {**figures, "peak": peak, "seconds": device_seconds(run, 3, "cpu")}


def _distance(found: dict[str, torch.Tensor], setting: Setting) -> float | None:
    """The norm of the difference to the sum in float64, relative to its norm."""
    path = Path(setting.given["file"])
    if not path.exists():
        return None
    exact = torch.load(path)
    apart = sum(float((found[n].cpu().double() - t).square().sum()) for n, t in exact.items())
    return float((apart / sum(float(t.double().square().sum()) for t in exact.values())) ** 0.5)


def variants(lengths: list[int]) -> dict[str, Variant]:
    """All ways at all lengths, by names that say both."""
    found: dict[str, Variant] = {}
    for length in lengths:
        found[f"{length} {REFERENCE}"] = functools.partial(reference, length=length)
        for way in WAYS:
            found[f"{length} {way}"] = functools.partial(in_torch, length=length, way=way)
        for number, way in enumerate(per_sample.JAX_WAYS):
            found[f"{length} {way}"] = functools.partial(in_jax, length=length, number=number)
    return found


VARIANTS = variants([*LENGTHS, *TOY_LENGTHS])

COLUMNS = [
    Column("tokens", "problem"),
    Column("way", "way"),
    Column("peak", "peak, GiB", ".2f", 2**30),
    Column("peak_ratio", "to torch", ".3f"),
    Column("seconds", "time, ms", ".0f", 1e-3),
    Column("seconds_ratio", "to torch", ".2f"),
    Column("distance", "from float64", ".1e"),
]


def result(rows: list[dict[str, Any]], device: torch.device) -> Result:
    """The table of the rows that there are."""
    for problem in dict.fromkeys(row["tokens"] for row in rows):
        own = [row for row in rows if row["tokens"] == problem]
        for key in ("peak", "seconds"):
            ratios(own, key, own[0])
    versions = environment(device, *installed("opacus", "jax"))
    return Result(NAME, CLAIM + ".", COLUMNS, rows, errors(rows, "way"), versions)


def run(found: Arguments) -> Result:
    """Measure all ways, and write each down as it comes."""
    runner = Runner("bench.gpu.gpt_per_sample", VARIANTS, found)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for length in TOY_LENGTHS if found.setting.toy else LENGTHS:
            file = f"{folder}/{length}.pt"
            runner.run(f"{length} {REFERENCE}", file=file)
            for way in (*WAYS, *per_sample.JAX_WAYS):
                problem = work_of(length, Setting(toy=found.setting.toy)).name
                figures = runner.run(f"{length} {way}", file=file)
                rows.append({"tokens": problem, "way": way, **figures})
                found.write(result(rows, runner.device))
    return result(rows, runner.device)


if __name__ == "__main__":
    parsed = arguments(NAME, CLAIM, SECONDS)
    run(parsed).show()
