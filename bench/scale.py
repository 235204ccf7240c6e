"""Claim: what a region costs does not depend on how many there are.

Chains of 4 to 1,024 layers, a region every square root of their number: time a layer stays, memory
grows with the square root, as predicted: boundaries, one region's residuals and cotangent.
Then a pytree of 10,000 parameter tensors in one region, and nests of regions.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import functx
from bench._common import Column, Result, device_argument, environment, least_seconds, one_thread
from functx import memory

NAME = "scale"
CLAIM = "Gradients of chains of tanh(x @ w), 64 x 64, a region every square root of their length"
LENGTHS = (4, 16, 64, 256, 1024)
WIDTH, EXAMPLES, REPEATS = 64, 64, 3
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "scale.png"


def segment(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def chain(region: Any, weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    every = math.isqrt(len(weights))
    for start in range(0, len(weights), every):
        x = region(segment)(weights[start : start + every], x)
    return x.square().sum()


def identity(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


def lengths(device: torch.device) -> list[dict[str, Any]]:
    x = torch.randn(EXAMPLES, WIDTH, device=device)
    rows = []
    for n in LENGTHS:
        weights = [torch.randn(WIDTH, WIDTH, device=device) / 8 for _ in range(n)]
        calls = [
            functools.partial(functx.grad(functools.partial(chain, region), 1), weights, x)
            for region in (identity, functx.remat)
        ]
        calls = [torch.no_grad()(call) for call in calls]
        plain, ours = least_seconds(calls, REPEATS, time.process_time, device)
        activation, root = x.nbytes, math.isqrt(n)
        rows.append(
            {
                "what": f"{n} layers",
                "layers": n,
                "plain": plain / n,
                "ours": ours / n,
                "plain_peak": memory.peak(calls[0]) / activation,
                "peak": memory.peak(calls[1]) / activation,
                # Boundaries and one region's residuals, of which the caller has the first; its
                # cotangent, and a product. Of few layers: the boundaries, and the loss's pullback.
                "predicted": float(max(2 * root, root + 3)),
            }
        )
    return rows


def many_tensors(device: torch.device, n: int = 10_000) -> dict[str, Any]:
    """One region that takes a pytree of many tensors."""
    params = {f"layer{i}": {"w": torch.ones(4, device=device)} for i in range(n)}

    def f(params: Any) -> torch.Tensor:
        return torch.stack([torch.sin(own["w"]) for own in params.values()]).sum()

    calls = [torch.no_grad()(functools.partial(functx.grad(g), params)) for g in (f, _remat(f))]
    plain, ours = least_seconds(calls, 1, time.process_time, device)
    return {"what": f"{n:,} parameter tensors", "plain": plain / n, "ours": ours / n}


def _remat(f: Callable[..., Any]) -> Callable[..., Any]:
    return functx.remat(f)


def nest(depth: int) -> Callable[..., torch.Tensor]:
    f: Callable[..., torch.Tensor] = torch.sin
    for _ in range(depth):
        f = functx.remat(f)
    return f


def nests(device: torch.device) -> list[dict[str, Any]]:
    x = torch.linspace(0, 1, 8, device=device)

    def plain(depth: int) -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(nest(depth)(leaf).sum(), leaf)

    def three(depth: int) -> Any:
        f = nest(depth)
        second = functx.grad(lambda x: functx.grad(lambda x: f(x).sum())(x).sum())
        return functx.vmap(second)(x[None])

    found = []
    for name, run, depth in (("", plain, 50), (" under vmap, grad and grad", three, 20)):
        (seconds,) = least_seconds([functools.partial(run, depth)], 1, time.process_time, device)
        found.append({"what": f"{depth} regions in each other{name}", "ours": seconds / depth})
    return found


def draw(rows: list[dict[str, Any]], path: Path = PICTURE) -> None:
    """Time a layer and peaks over the number of layers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    n = [row["layers"] for row in rows]
    left.plot(n, [row["plain"] * 1e6 for row in rows], "o-", label="no regions")
    left.plot(n, [row["ours"] * 1e6 for row in rows], "o-", label="functx.remat")
    left.set_ylabel("CPU time a layer, microseconds")
    left.set_ylim(bottom=0)
    right.plot(n, [row["plain_peak"] for row in rows], "o-", label="no regions")
    right.plot(n, [row["peak"] for row in rows], "o-", label="functx.remat")
    right.plot(n, [row["predicted"] for row in rows], "k--", label="predicted", linewidth=1)
    right.set_ylabel("peak, activations")
    right.set_yscale("log", base=2)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("layers")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


@one_thread()
def run(device: torch.device) -> Result:
    rows = lengths(device)
    draw(rows)
    rows += [many_tensors(device), *nests(device)]
    columns = [
        Column("what", "program"),
        Column("plain", "no regions, CPU time a layer, µs", ".0f", 1e-6),
        Column("ours", "functx.remat, CPU time a layer, µs", ".0f", 1e-6),
        Column("plain_peak", "no regions, peak, activations", ".1f"),
        Column("peak", "functx.remat, peak, activations", ".1f"),
        Column("predicted", "predicted", ".1f"),
    ]
    notes = ["The last rows: time a tensor, and a region."]
    return Result(NAME, CLAIM + ".", columns, rows, notes, environment(device))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
