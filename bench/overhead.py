"""Claim: a remat region costs little by itself.

20 regions around one ``sin`` of 8 numbers, one thread: CPU time a region above what the same
program takes without regions is what the machinery costs. "Idle" is what an engine on top of
autograd alone would be made of, doing nothing: a custom Function that runs the body in two modes,
which look at nothing, and whose backward has the formula at hand.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import functx
from bench._common import Column, Result, device_argument, environment, least_seconds, one_thread

NAME = "overhead"
CLAIM = "CPU time of one region around one sin, microseconds (20 regions, one thread)"
REGIONS, REPEATS = 20, 200


class FunctionMode(TorchFunctionMode):
    """Looks at nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """Looks at nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Idle(torch.autograd.Function):
    """``torch.sin`` in a region that checks and captures nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """The sine."""
        with FunctionMode(), DispatchMode():
            return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """What the formula reads."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The formula."""
        return gradient * ctx.saved_tensors[0].cos()


def chain(region: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        for _ in range(REGIONS):
            x = region(x)
        return x.sum()

    return f


def base(f: Callable[..., Tensor], x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf)


def programs(library: Any) -> dict[str, Callable[..., Any]]:
    return {
        "autograd.grad": base,
        "grad": lambda f, x: library.grad(f)(x),
        "vmap(grad)": lambda f, x: library.vmap(library.grad(f))(x[None]),
    }


@one_thread()
def run(device: torch.device) -> Result:
    x = torch.linspace(0, 1, 8, device=device)
    regions: dict[str, tuple[Any, Any]] = {
        "none": (torch.func, torch.sin),
        "torch.utils.checkpoint": (
            torch.func,
            lambda x: checkpoint(torch.sin, x, use_reentrant=False),
        ),
        "idle: a Function and two modes": (torch.func, Idle.apply),
        "functx.remat": (functx, functx.remat(torch.sin)),
    }
    rows: dict[str, dict[str, Any]] = {name: {"region": name} for name in regions}
    errors = set()
    runs = {}
    for name, (library, region) in regions.items():
        for program, transform in programs(library).items():
            call = functools.partial(transform, chain(region), x)
            try:
                call()
            except RuntimeError as error:
                rows[name]["error"] = str(error).partition(". ")[0]
                errors.add(rows[name]["error"])
            else:
                runs[name, program] = call
    seconds = least_seconds(list(runs.values()), REPEATS, time.process_time)
    for (name, program), one in zip(runs, seconds):
        rows[name][program] = one / REGIONS * 1e6
    columns = [Column("region", "region")]
    columns += [Column(program, program, ".0f") for program in programs(functx)]
    result = Result(
        NAME, CLAIM + ".", columns, list(rows.values()), environment=environment(device)
    )
    result.notes = [f'error: "{error}".' for error in sorted(errors)]
    return result


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.show()
    result.write()
