"""Claim: loops with a few slots run the binomial optimum of steps again, at a peak of the slots.

The gradient, with respect to the first state and what the body closes over, of ``tanh(h @ w)``
iterated. Counts of the body are exact; the peak is in states, of 64 kB each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint_sequential

import functx
from bench._common import Column, Result, device_argument, environment
from functx import memory
from functx._loops import binomial

NAME = "loops"
CLAIM = "Steps that a loop's gradient runs again, and its peak, by the states that it may keep."
LENGTHS = {128: (3, 5, 10, 20), 1024: (5, 10, 32)}
ROWS, WIDTH = 256, 64
STATE = ROWS * WIDTH * 4

Loop = Callable[[Callable[[Any], Any], Any], Any]
"""Takes the body and the first state."""


def known(steps: int, slots: int, body: Any, x: torch.Tensor) -> torch.Tensor:
    return functx.remat_loop(body, x, steps, slots=slots)


def unknown(steps: int, body: Any, x: torch.Tensor) -> torch.Tensor:
    """While a condition holds that no schedule can foresee."""

    def counted(state: Any) -> Any:
        i, x = state
        return i + 1, body(x)

    return functx.remat_loop(counted, (0, x), cond=lambda s: s[0] < steps)[1]


def plain(steps: int, body: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(steps):
        x = body(x)
    return x


def torch_sequential(steps: int, segments: int, body: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential([body] * steps, segments, x, use_reentrant=False)


def gradient(loop: Loop, x: torch.Tensor, weight: torch.Tensor) -> Any:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = loop(lambda h: torch.tanh(h @ weight), x)
    return torch.autograd.grad(out.sum(), (x, weight))


def recomputed(steps: int, slots: int) -> int:
    """How many steps the best schedule runs again in a backward pass."""
    *regions, _ = binomial.chain(steps, slots)
    return sum(m + recomputed(m, own) for m, own in regions)


def measured(loop: Loop, steps: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(device)
    weight = (torch.randn(WIDTH, WIDTH, generator=generator) / 8).to(device)
    again = memory.count(gradient, loop, x, weight)["tanh"] - steps
    return {"again": again, "states": memory.peak(gradient, loop, x, weight) / STATE}


def torch_rows(steps: int, device: torch.device) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"loop": "a plain loop", **measured(functools.partial(plain, steps), steps, device)}
    ]
    segments = {binomial.default_slots(steps), int(steps**0.5)}
    for count in sorted(segments):
        loop = functools.partial(torch_sequential, steps, count)
        title = f"torch checkpoint_sequential, {count} segments"
        rows.append({"loop": title, **measured(loop, steps, device)})
    for slots in LENGTHS[steps]:
        row = {"loop": "functx.remat_loop", "slots": slots}
        row["best"] = recomputed(steps, slots)
        rows.append(row | measured(functools.partial(known, steps, slots), steps, device))
    loop = functools.partial(unknown, steps)
    return [*rows, {"loop": "functx.remat_loop, length unknown", **measured(loop, steps, device)}]


def jax_rows(steps: int) -> list[dict[str, Any]]:
    """The same in JAX: a scan, and scans of checkpointed scans of equal length."""
    import jax
    import jax.numpy as jnp

    from functx.compat import _jax

    weight = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 8
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    ran = 0

    def tick(_: Any) -> None:
        nonlocal ran
        ran += 1

    def nested(body: Any, h: Any, lengths: tuple[int, ...]) -> Any:
        if not lengths:
            return body(h)
        inner = functools.partial(nested, body, lengths=lengths[1:])
        inner = jax.checkpoint(inner) if len(lengths) > 1 else inner
        return jax.lax.scan(lambda h, _: (inner(h), None), h, length=lengths[0])[0]

    def grad_of(lengths: tuple[int, ...], counted: bool) -> Any:
        def loss(weight: Any, x: Any) -> Any:
            def body(h: Any) -> Any:
                if counted:
                    jax.debug.callback(tick, h[0, 0])  # by a value, or it is hoisted
                return jnp.tanh(h @ weight)

            return nested(body, x, lengths).sum()

        return jax.jit(jax.grad(loss, (0, 1)))

    root = 2 ** (steps.bit_length() // 2)
    rows = []
    for title, lengths in (
        ("jax.lax.scan", (steps,)),
        (f"jax.lax.scan of {steps // root} jax.checkpoint", (steps // root, root)),
    ):
        options = _jax.KEEP_RECOMPUTE if jax.default_backend() == "cpu" else None
        compiled = grad_of(lengths, counted=False).lower(weight, x).compile(options)
        stats = compiled.memory_analysis()
        ran = 0
        jax.block_until_ready(grad_of(lengths, counted=True)(weight, x))
        jax.effects_barrier()
        peak = stats.temp_size_in_bytes + stats.output_size_in_bytes
        rows.append({"loop": title, "again": ran - steps, "states": peak / STATE})
    return rows


def run(device: torch.device) -> Result:
    rows = []
    for steps in LENGTHS:
        own = torch_rows(steps, device) + jax_rows(steps)
        rows += [{"steps": steps} | row for row in own]
    columns = [
        Column("steps", "steps", ".0f"),
        Column("loop", "loop"),
        Column("slots", "slots", ".0f"),
        Column("again", "run again", ".0f"),
        Column("best", "binomial optimum", ".0f"),
        Column("states", "peak, states", ".1f"),
    ]
    return Result(NAME, CLAIM, columns, rows, [], environment(device, "jax"))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
