"""Claim: JAX's random numbers cost no more in torch than torch's own.

A million numbers from a key: eager, compiled, and in JAX, to ``torch.rand`` of as many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bench._common import (
    Column,
    Result,
    device_argument,
    environment,
    median_seconds,
    one_thread,
    ratios,
)
from functx.compat import random

NAME = "random_numbers"
CLAIM = "Time of a million random numbers from a key, milliseconds (one thread)"
SIZE, REPEATS = 1_000_000, 25


def draws(device: torch.device) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """What is drawn from a key: in torch, in JAX."""
    import jax
    import jax.numpy as jnp

    x = torch.ones(SIZE, device=device)
    x_jax = jnp.ones(SIZE)

    def dropout(key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.9, (SIZE,)), x_jax / 0.9, 0)

    return {
        "bits": (lambda k: random.bits(k, (SIZE,)), lambda k: jax.random.bits(k, (SIZE,))),
        "uniform": (lambda k: random.uniform(k, (SIZE,)), lambda k: jax.random.uniform(k, (SIZE,))),
        "dropout": (lambda k: random.dropout(k, x, 0.1), dropout),
        "normal": (lambda k: random.normal(k, (SIZE,)), lambda k: jax.random.normal(k, (SIZE,))),
    }


@one_thread()
def run(device: torch.device) -> Result:
    import jax

    key = random.key(42, device=device)
    x = torch.ones(SIZE, device=device)
    own: dict[str, Callable[[], Any]] = {
        "torch.rand": lambda: torch.rand(SIZE, device=device),
        "torch.nn.functional.dropout": lambda: torch.nn.functional.dropout(x, 0.1),
        "torch.randn": lambda: torch.randn(SIZE, device=device),
    }
    runs: dict[tuple[str, str], Callable[[], Any]] = {
        (name, "eager"): call for name, call in own.items()
    }
    for name, (ours, theirs) in draws(device).items():
        compiled = torch.compile(ours, fullgraph=True)
        jitted = jax.jit(theirs)
        typed = random.to_jax(key)
        runs[f"random.{name}", "eager"] = functools.partial(ours, key)
        runs[f"random.{name}", "compiled"] = functools.partial(compiled, key)
        runs[f"random.{name}", "jax"] = functools.partial(_finished, jitted, typed)
    seconds = median_seconds(list(runs.values()), REPEATS, device=device)
    rows: dict[str, dict[str, Any]] = {}
    for (name, how), one in zip(runs, seconds):
        rows.setdefault(name, {"draw": name})[how] = one
    for row in rows.values():
        row["best"] = row.get("compiled", row["eager"])
    ratios(list(rows.values()), "best", rows["torch.rand"])
    columns = [
        Column("draw", "draw"),
        Column("eager", "eager", ".2f", 1e-3),
        Column("compiled", "compiled", ".2f", 1e-3),
        Column("jax", "JAX (jit)", ".2f", 1e-3),
        Column("best_ratio", "compiled, to torch.rand", ".2f"),
    ]
    return Result(
        NAME, CLAIM + ".", columns, list(rows.values()), environment=environment(device, "jax")
    )


def _finished(f: Callable[..., Any], *args: Any) -> None:
    import jax

    jax.block_until_ready(f(*args))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
