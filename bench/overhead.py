"""Claim: a remat region costs little by itself.

CPU time of a program with regions, in units of the same program under `torch.utils.checkpoint` in
plain autograd, one thread. The first rows are 20 regions around one ``sin`` of 8 numbers, so nearly
all of their time is the machinery's; the others do some work in each region. What is a region is
what users have: a lambda, a function of torch's, a method, a module with dropout whose parameters
all get gradients. A figure is the median of calls that are made in turns with those of its unit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functx
from bench._common import Column, Result, device_argument, environment, median_seconds, one_thread

NAME = "overhead"
CLAIM = "CPU time with regions, in units of torch.utils.checkpoint in plain autograd, one thread"
REGIONS, REPEATS = 20, 60
Region = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


def checkpointed(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return functools.partial(checkpoint, f, use_reentrant=False)


def plain(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return f


class Sine:
    """What has a method."""

    def of(self, x: Tensor) -> Tensor:
        """The sine of ``x``."""
        return x.sin()


def chain(f: Callable[[Tensor], Tensor]) -> Callable[[Region], Callable[[Tensor], Tensor]]:
    """Regions of one ``sin``, made once of ``f``."""

    def made(region: Region) -> Callable[[Tensor], Tensor]:
        sin = region(f)

        def program(x: Tensor) -> Tensor:
            for _ in range(REGIONS):
                x = sin(x)
            return x.sum()

        return program

    return made


def closures(region: Region) -> Callable[[Tensor], Tensor]:
    """Regions of closures that are made anew each time."""

    def f(x: Tensor) -> Tensor:
        for _ in range(REGIONS):
            k = torch.sin
            x = region(lambda x, k=k: k(x))(x)
        return x.sum()

    return f


def sixteen(region: Region) -> Callable[[Tensor], Tensor]:
    """One region of 16 operations."""

    def body(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.tanh(x.sin())
        return x

    inner = region(body)
    return lambda x: inner(x).sum()


def layer(region: Region) -> Callable[[Tensor], Tensor]:
    """One region around a small transformer layer with dropout."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
    inner = region(block)

    def program(x: Tensor) -> Tensor:
        return inner(x).sum()

    program.parameters = [*block.parameters()]  # type: ignore[attr-defined]
    return program


def base(f: Callable[..., Tensor], x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(f(leaf), [leaf, *getattr(f, "parameters", ())])


X = torch.linspace(0, 1, 8)
# The row, what makes the function, its input, and the transform.
ONE = chain(lambda x: x.sin())
UNIT = "one sin, a lambda: autograd.grad"
PROGRAMS: dict[str, tuple[Any, Tensor, Callable[..., Any]]] = {
    UNIT: (ONE, X, base),
    "one sin, torch.sin": (chain(torch.sin), X, base),
    "one sin, a method": (chain(Sine().of), X, base),
    "one sin, a closure made anew": (closures, X, base),
    "one sin: grad": (ONE, X, lambda f, x: functx.grad(f)(x)),
    "one sin: vmap(grad)": (ONE, X[None], lambda f, x: functx.vmap(functx.grad(f))(x)),
    "one sin: jvp(grad)": (ONE, X, lambda f, x: functx.jvp(functx.grad(f), (x,), (x,))),
    "one sin: vmap(hessian)": (ONE, X[None], lambda f, x: functx.vmap(functx.hessian(f))(x)),
    "16 operations: autograd.grad": (sixteen, X, base),
    "a transformer layer: autograd.grad": (layer, torch.ones(2, 4, 16), base),
}


@one_thread()
def run(device: torch.device) -> Result:
    runs, unit = {}, {}
    for name, (make, x, transform) in PROGRAMS.items():
        ways = {"without": plain, "functx": functx.remat}
        if transform is base:
            ways["checkpoint"] = checkpointed
        unit[name] = (name if transform is base else UNIT), "checkpoint"
        with torch.device(device):
            for way, region in ways.items():
                runs[name, way] = functools.partial(transform, make(region), x.to(device))
    for call in runs.values():
        call()
    seconds = dict(zip(runs, median_seconds([*runs.values()], REPEATS, time.process_time)))
    rows = [
        {
            "program": name,
            "without": seconds[name, "without"] / seconds[unit[name]],
            "functx": seconds[name, "functx"] / seconds[unit[name]],
            "microseconds": seconds[unit[name]] * 1e6,
        }
        for name in PROGRAMS
    ]
    columns = [
        Column("program", "program"),
        Column("without", "without regions", ".2f"),
        Column("functx", "functx.remat", ".2f"),
        Column("microseconds", "the unit, microseconds", ".0f"),
    ]
    return Result(NAME, CLAIM + ".", columns, rows, environment=environment(device))


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
