"""Claim: where the operations are small, and Python is what takes the time, functx keeps up.

Programs of small tensors, as a GPU with moderate batches sees them: launching the operations takes
longer than they do. A GPT of 12 blocks (width 16, 4 examples of 8 tokens), a region a block; its
per-example gradients, and their clipped sum; a physics-informed network, whose equation has third
derivatives with respect to the input. CPU time of one thread, medians of calls made in turns.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import functx
from bench._blocks import REGIONS
from bench._common import Column, Result, device_argument, environment, median_seconds, one_thread
from bench._per_sample_models import Workload
from bench._transformer import Transformer
from bench.per_sample import opacus_hooks, torch_loop, torch_vmap
from functx import per_sample

NAME = "launch_bound"
CLAIM = "CPU time of programs of small tensors, one thread; ratios to the first row of each program"
REPEATS = 15
LAYERS, WIDTH, TOKENS, BATCH = 12, 16, 8, 4
# Of the physics-informed network: a multilayer perceptron from (t, x) to u.
HIDDEN_LAYERS, HIDDEN_WIDTH, POINTS = 4, 32, 64
Run = Callable[[], Any]


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TOKENS, LAYERS, WIDTH, vocabulary=32, heads=2)


def with_regions(model: Transformer, region: Any) -> Transformer:
    """The same with each block in a region."""
    blocks = [region(block) for block in model.blocks]

    def chain(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    model.chain = chain
    return model


def text(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (BATCH, TOKENS + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def batch_gradient(device: torch.device, region: Any) -> Run:
    """The gradient of the loss of the batch, by autograd."""
    model, (x, y) = with_regions(transformer(), region).to(device), text(device)
    parameters = [*model.parameters()]

    def run() -> Any:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        return torch.autograd.grad(loss, parameters)

    return run


def example_gradients(device: torch.device, region: Any) -> Run:
    """``vmap(grad)`` of the loss of an example."""
    model, (x, y) = with_regions(transformer(), region).to(device), text(device)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functx.functional_call(model, params, (x[None],))[0], y)

    each = functx.vmap(functx.grad(loss), (None, 0, 0))
    return lambda: each(params, x, y)


def workload(device: torch.device) -> Workload:
    return Workload("GPT", transformer, *text(device), lambda name: False)


def clipped_sum(device: torch.device, **options: Any) -> Run:
    work = workload(device)
    loss, params = work.loss_of_one()
    f = per_sample.clipped_sum(loss, max_norm=1.0, **options)
    return lambda: f(params, work.x, work.y)


def network(device: torch.device, region: Any) -> tuple[nn.Module, list[nn.Parameter]]:
    """An MLP with a region around each hidden layer, and its parameters."""
    torch.manual_seed(0)
    widths = [2, *[HIDDEN_WIDTH] * HIDDEN_LAYERS]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    plain = nn.Sequential(*layers, nn.Linear(HIDDEN_WIDTH, 1)).to(device)
    regions: list[Any] = [region(layer) for layer in layers]
    return nn.Sequential(*regions, plain[-1]), [*plain.parameters()]


def korteweg_de_vries(device: torch.device, region: Any) -> Run:
    """The gradient of the residual of u_t + 6 u u_x + u_xxx = 0, by autograd."""
    model, parameters = network(device, region)
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(POINTS, 2, generator=generator).to(device)

    def u(t: Tensor, x: Tensor) -> Tensor:
        return model(torch.stack([t, x]))[0]

    u_x = functx.grad(u, 1)
    u_xxx = functx.grad(functx.grad(u_x, 1), 1)

    def residual(t: Tensor, x: Tensor) -> Tensor:
        return functx.grad(u, 0)(t, x) + 6 * u(t, x) * u_x(t, x) + u_xxx(t, x)

    def run() -> Any:
        loss = functx.vmap(residual)(points[:, 0], points[:, 1]).square().mean()
        return torch.autograd.grad(loss, parameters)

    return run


def _plain(f: Any) -> Any:
    return f


PLAIN, CHECKPOINT, FUNCTX = "without regions", "torch.utils.checkpoint", "functx.remat"
BATCH_GRADIENT = "GPT, autograd"
EXAMPLES = "GPT, vmap(grad)"
CLIPPED = "GPT, clipped sum"
ONE_BY_ONE = "GPT, clipped sum, one at a time"
PINN = "physics-informed network, third derivatives"
# For each program its ways; the first of them is what the others are compared with.
WAYS: dict[str, dict[str, Callable[[torch.device], Run]]] = {
    BATCH_GRADIENT: {
        CHECKPOINT: functools.partial(batch_gradient, region=REGIONS["torch.utils.checkpoint"]),
        PLAIN: functools.partial(batch_gradient, region=_plain),
        FUNCTX: functools.partial(batch_gradient, region=functx.remat),
    },
    EXAMPLES: {
        PLAIN: functools.partial(example_gradients, region=_plain),
        FUNCTX: functools.partial(example_gradients, region=functx.remat),
    },
    CLIPPED: {
        "torch.func, by hand": lambda device: torch_vmap(workload(device)),
        "Opacus hooks": lambda device: opacus_hooks(workload(device)),
        "functx.per_sample": clipped_sum,
    },
    ONE_BY_ONE: {
        "torch.func, a loop by hand": lambda device: torch_loop(workload(device)),
        "functx.per_sample, chunk_size=1": functools.partial(clipped_sum, chunk_size=1),
    },
    PINN: {
        PLAIN: functools.partial(korteweg_de_vries, region=_plain),
        FUNCTX: functools.partial(korteweg_de_vries, region=functx.remat),
    },
}


def same(one: Any, other: Any) -> None:
    """A fast wrong way would not be worth a row."""
    one, other = (list(r.values()) if isinstance(r, dict) else list(r) for r in (one, other))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@one_thread()
def run(device: torch.device) -> Result:
    rows: list[dict[str, Any]] = []
    runs: list[Run] = []
    for program, ways in WAYS.items():
        first = None
        for way, make in ways.items():
            row: dict[str, Any] = {"program": program, "way": way}
            rows.append(row)
            try:
                one = make(device)
            except ImportError as error:
                row["error"] = str(error)
                continue
            for _ in range(3):  # what is found out at the first calls is no part of the others
                found = one()
            first = found if first is None else first
            same(found, first)
            runs.append(one)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    measured = [row for row in rows if "error" not in row]
    for row, seconds in zip(measured, median_seconds(runs, REPEATS, clock, device)):
        row["seconds"] = seconds
    for row in measured:
        base = next(r for r in measured if r["program"] == row["program"])
        row["ratio"] = row["seconds"] / base["seconds"]
    columns = [
        Column("program", "program"),
        Column("way", "by"),
        Column("seconds", "CPU time, ms", ".1f", 1e-3),
        Column("ratio", "to the first of the program", ".2f"),
    ]
    return Result(NAME, CLAIM + ".", columns, rows, [], environment(device))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
