"""Claim: a replay computes nothing that its pullback does not read.

Chains of ``sin``, cut into regions in the ways that JAX's own tests cut them. A ``sin`` is computed
again for the ``cos`` of the one after it, never for the value of the region: what is counted is how
many sins a gradient runs beyond those of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import functx
from bench._common import Column, Result, device_argument, environment
from functx import memory

NAME = "counts"
CLAIM = "Sines that a gradient computes again, beyond those of the forward pass"
Function = Callable[[Any], Any]


def composed(*functions: Function) -> Function:
    def f(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    return f


def recursive(n: int, sin: Function, remat: Callable[[Function], Function]) -> Function:
    """A region around the first half, each half built the same way."""
    if n == 1:
        return sin
    return composed(
        remat(recursive(n // 2, sin, remat)) if n > 2 else sin, recursive(n // 2, sin, remat)
    )


def binomial(n: int, sin: Function, remat: Callable[[Function], Function]) -> Function:
    """A region around both halves together, each half built the same way."""
    if n == 1:
        return sin
    return remat(composed(*[binomial(n // 2, sin, remat) for _ in range(2)]))


def programs(
    sin: Function, remat: Callable[[Function], Function]
) -> dict[str, tuple[int, int, Function]]:
    """For each program: how many sins it has, how many must be computed again, and itself."""
    two, four = composed(sin, sin), composed(sin, sin, sin, sin)
    found: dict[str, tuple[int, int, Function]] = {
        "remat(sin, sin)": (2, 1, remat(two)),
        "remat of remat": (2, 1, remat(remat(two))),
        "three deep": (2, 1, remat(remat(remat(two)))),
        "eight regions of one": (8, 0, composed(*[remat(sin) for _ in range(8)])),
        "two regions of four": (8, 6, composed(remat(four), remat(four))),
    }
    for n, again in ((4, 1), (8, 5), (16, 17), (32, 49)):
        found[f"recursive halving, {n}"] = n, again, recursive(n, sin, remat)
    for n, again in ((4, 4), (8, 12)):
        found[f"binomial, {n}"] = n, again, binomial(n, sin, remat)
    return found


def torch_checkpoint(f: Function) -> Function:
    return lambda x: checkpoint(f, x, use_reentrant=False)


def plain_gradient(f: Function, x: torch.Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(f(leaf).sum(), leaf)


def sums(f: Function) -> Function:
    return lambda x: f(x).sum()


def jax_sines(f: Function) -> int:
    """Sines in the program of a pullback, which JAX has cut down to what it reads."""
    import jax
    import jax.numpy as jnp

    def sines(jaxpr: Any) -> int:
        inner = [p for eqn in jaxpr.eqns for p in eqn.params.values()]
        inner = [getattr(p, "jaxpr", p) for p in inner if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
        return sum(e.primitive.name == "sin" for e in jaxpr.eqns) + sum(map(sines, inner))

    x = jnp.ones(8)
    value, pullback = jax.vjp(f, x)
    return sines(jax.make_jaxpr(pullback)(value).jaxpr)


def run(device: torch.device) -> Result:
    import jax
    import jax.numpy as jnp

    x = torch.linspace(0, 1, 8, device=device)
    ours = programs(torch.sin, functx.remat)
    torchs = programs(torch.sin, torch_checkpoint)
    jaxs = programs(jnp.sin, jax.checkpoint)
    rows = []
    for name, (n, _, f) in ours.items():
        rows.append(
            {
                "program": name,
                "functx": memory.count(plain_gradient, f, x)["sin"] - n,
                "vmap(grad)": memory.count(functx.vmap(functx.grad(sums(f))), x[None])["sin"] - n,
                "jax": jax_sines(jaxs[name][2]),
                "torch": memory.count(plain_gradient, torchs[name][2], x)["sin"] - n,
            }
        )
    columns = [
        Column("program", "program"),
        Column("functx", "functx.remat", ".0f"),
        Column("vmap(grad)", "functx.remat, vmap(grad)", ".0f"),
        Column("jax", "jax.checkpoint", ".0f"),
        Column("torch", "torch.utils.checkpoint", ".0f"),
    ]
    return Result(NAME, CLAIM + ".", columns, rows, [], environment(device, "jax"))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
