"""Claim: one compiled graph is quicker than eager, and keeps the memory that recompute saves.

Each program runs in eager with regions, by `functx.jit` with the same, by ``torch.compile`` of the
same transforms of torch.func without regions (which it can't have), and by ``jax.jit`` with
``jax.checkpoint`` (the loss lowered by ``functx.compat.to_jax``, with barriers kept). CPU time of
one thread, in turns; on a GPU larger programs, and the time until it is done. Peaks are of what is
allocated in the call, results too.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

import functx
from bench._common import Column, Result, device_argument, environment, median_seconds, one_thread
from bench._transformer import Block

NAME = "compiled"
CLAIM = "Time and peak of compiled stacks with regions, next to eager and to jax.jit"
REPEATS = 5
SYSTEMS = ("eager, functx.remat", "functx.jit, functx.remat", "torch.compile, no regions")
JAX_SYSTEM = "jax.jit, jax.checkpoint"
Loss = Callable[[Any, Any], Any]


@dataclass
class Program:
    """A loss of parameters and data, made with a ``remat``, and what is computed of it."""

    name: str
    kind: str
    loss: Callable[[Any], Loss]
    params: Any
    x: Tensor


def chain(name: str, kind: str, rows: int, width: int, layers: int, every: int, body: Any) -> Any:
    def loss(remat: Any) -> Loss:
        @remat
        def region(x: Tensor, *weights: Tensor) -> Tensor:
            for w in weights:
                x = body(x, w)
            return x

        def f(params: list[Tensor], x: Tensor) -> Tensor:
            for i in range(0, layers, every):
                x = region(x, *params[i : i + every])
            return x.square().mean()

        return f

    params = [torch.randn(width, width) / width**0.5 for _ in range(layers)]
    return Program(name, kind, loss, params, torch.randn(rows, width))


def gpt(width: int = 128, rows: int = 4) -> Program:
    blocks = [Block(width, 4) for _ in range(4)]

    def loss(remat: Any) -> Loss:
        region = remat(lambda own, x: functional_call(blocks[0], own, (x,)))

        def f(params: Any, x: Tensor) -> Tensor:
            for own in params:
                x = region(own, x)
            return x.square().mean()

        return f

    params = [{n: p.detach() for n, p in b.named_parameters()} for b in blocks]
    return Program("step of a GPT, 4 blocks", "step", loss, params, torch.randn(rows, 128, width))


def llama(width: int = 128, rows: int = 4) -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    plain, regions = LlamaForCausalLM(config), LlamaForCausalLM(config)
    functx.apply_remat(regions, type(regions.model.layers[0]))

    def loss(remat: Any) -> Loss:
        model = regions if remat is functx.remat else plain

        def f(params: Any, ids: Tensor) -> Tensor:
            given = {"input_ids": ids, "labels": ids}
            return functional_call(model, params, (), given).loss

        return f

    params = {n: p.detach() for n, p in plain.named_parameters()}
    ids = torch.randint(0, 512, (rows, 128))
    return Program("step of a Llama, 4 layers", "step", loss, params, ids)


def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def waves(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(torch.tanh(x)) @ w


def small(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x * w.sum(0)).exp().tanh() + torch.cos(x)


def programs(device: torch.device) -> list[Program]:
    if device.type == "cuda":
        return [
            chain("gradient, 24 layers, regions of 4", "grad", 8192, 2048, 24, 4, layer),
            chain("gradient, 24 waves, regions of 1", "grad", 8192, 2048, 24, 1, waves),
            chain("per-example gradients, 12 layers", "vmap(grad)", 128, 512, 12, 3, layer),
            chain("HVP, 12 layers, regions of 3", "hvp", 8192, 1024, 12, 3, layer),
            gpt(1024, 16),
            llama(1024, 16),
        ]
    return [
        chain("gradient, 24 layers, regions of 4", "grad", 512, 256, 24, 4, layer),
        chain("gradient, 24 waves, regions of 1", "grad", 512, 256, 24, 1, waves),
        chain("gradient, 24 small layers", "grad", 16, 16, 24, 4, layer),
        chain("gradient, 24 pointwise layers", "grad", 4096, 64, 24, 4, small),
        chain("per-example gradients, 12 layers", "vmap(grad)", 64, 128, 12, 3, layer),
        chain("clipped sum, 12 layers", "clipped", 64, 128, 12, 3, layer),
        chain("HVP, 12 layers, regions of 3", "hvp", 512, 128, 12, 3, layer),
        gpt(),
        llama(),
    ]


def computed(kind: str, library: Any, f: Loss) -> Callable[[Any, Any], Any]:
    """What a program computes of its loss, by torch, functx or JAX."""
    gradient = library.grad(f)
    per_example = library.vmap(gradient, (None, 0))
    if kind == "grad":
        return gradient
    if kind == "vmap(grad)":
        return per_example
    if kind == "hvp":
        return lambda p, x: library.jvp(lambda p: gradient(p, x), (p,), (p,))[1]
    if kind == "step":

        def step(params: Any, x: Any) -> Any:
            return pytree.tree_map(lambda p, g: p - 0.1 * g, params, gradient(params, x))

        return step

    def clipped(params: Any, x: Any) -> Any:
        rows = per_example(params, x)
        norms = sum((g**2).reshape(len(x), -1).sum(1) for g in rows) ** 0.5
        factors = 1 / (1 + norms)
        return [(g * factors.reshape(-1, 1, 1)).sum(0) for g in rows]

    return clipped


def by_jax(program: Program) -> tuple[Callable[[], Any], int]:
    """The compiled call, and its temporaries and results in bytes."""
    import jax

    from functx.compat import to_jax

    jax.config.update("jax_default_matmul_precision", "highest")  # as torch's

    tensors = program.params, program.x
    params, x = pytree.tree_map(lambda t: jax.numpy.asarray(t.cpu().numpy()), tensors)
    f = computed(program.kind, jax, to_jax(program.loss(functx.remat)))
    # On a CPU XLA would merge a recompute with its forward; on a GPU it knows no other way.
    keep = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    options = keep if jax.default_backend() == "cpu" else None
    run = jax.jit(f).lower(params, x).compile(compiler_options=options)
    found = run.memory_analysis()
    nbytes = found.temp_size_in_bytes + found.output_size_in_bytes
    return lambda: jax.block_until_ready(run(params, x)), nbytes


def measured(program: Program, device: torch.device) -> list[dict[str, Any]]:
    eager = computed(program.kind, functx, program.loss(functx.remat))
    plain = computed(program.kind, torch.func, program.loss(lambda f: f))
    compiled = functx.jit(eager), torch.compile(plain)
    args = program.params, program.x
    rows: list[dict[str, Any]] = [
        {"program": program.name, "system": system} for system in (*SYSTEMS, JAX_SYSTEM)
    ]
    runs, expected = [], eager(*args)
    for row, f in zip(rows, (eager, *compiled)):
        start = time.perf_counter()
        for a, b in zip(pytree.tree_leaves(f(*args)), pytree.tree_leaves(expected)):
            assert (a - b).norm() <= 1e-3 * b.norm() + 1e-6, f"{program.name}, {row['system']}"
        row["compile"] = None if f is eager else time.perf_counter() - start
        row["peak"] = functx.memory.peak(f, *args)
        runs.append(functools.partial(f, *args))
    start = time.perf_counter()
    call, rows[-1]["peak"] = by_jax(program)
    rows[-1]["compile"] = time.perf_counter() - start
    runs.append(call)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for row, seconds in zip(rows, median_seconds(runs, REPEATS, clock, device)):
        row["seconds"] = seconds
        row["speed"] = rows[0].get("seconds", seconds) / seconds
        row["peak_ratio"] = row["peak"] / rows[0]["peak"]
    return rows


@one_thread()
def run(device: torch.device) -> Result:
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    with device:
        made = programs(device)
    columns = [
        Column("program", "program"),
        Column("system", "by"),
        Column("compile", "compiled in, s", ".1f"),
        Column("seconds", "time, ms", ".1f", 1e-3),
        Column("speed", "times as fast as eager", ".2f"),
        Column("peak", "peak, MiB", ".2f", 2**20),
        Column("peak_ratio", "to eager", ".2f"),
    ]
    rows: list[dict[str, Any]] = []
    versions = environment(device, "jax", "transformers")
    result = Result(NAME, CLAIM + ".", columns, rows, [], versions)
    for program in made:
        rows += measured(program, device)
        for row in rows[-4:]:
            print({k: v for k, v in row.items() if v is not None}, flush=True)
        result.write()  # in case that time runs out
    return result


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1 "
        + os.environ.get("XLA_FLAGS", "")
    )
    run(device_argument(NAME, CLAIM)).show()
