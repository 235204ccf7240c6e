"""Run a random program with and without remat, and say what differs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cases import DTYPE, numbers
from references import total
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import functx

from .env import Env
from .writer import Program

LIBRARIES = {"functx": functx, "torch.func": torch.func}
FORWARD = {"vmap", "jvp", "jacfwd"}
ROUNDINGS = 8
EPS = torch.finfo(DTYPE).eps


class Difference(AssertionError):
    """With remat a program does something else than without."""


class Watch(TorchDispatchMode):
    """Counts an operation, and sums up the absolute values of all that any operation makes.

    Forward mode makes zeros without memory, on which torch crashes in the presence of a mode.
    """

    def __init__(self, measure: bool) -> None:
        super().__init__()
        self.measure = measure
        self.markers = 0
        self.total = 1.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_with_memory, (args, kwargs or {}))
        out = func(*args, **kwargs)
        self.markers += func is torch.ops.aten.sigmoid.default
        if self.measure:
            for t in out if isinstance(out, (tuple, list)) else (out,):
                self.add(t)
        return out

    def add(self, t: Any) -> None:
        if isinstance(t, torch.Tensor) and t.dtype == DTYPE and t.device.type == "cpu":
            size = 0.0 if t._is_zerotensor() else float(t.detach().abs().sum())
            if math.isfinite(size):
                self.total += size


def _with_memory(t: Any) -> Any:
    if isinstance(t, torch.Tensor) and t._is_zerotensor():
        return torch.zeros(t.shape, dtype=t.dtype)
    return t


@dataclass
class Result:
    """What a program gave.

    Attributes:
        values: of the stack of transforms, and the buffer afterwards.
        gradients: of the sum of all values, with respect to the input, leaves and parameters.
        state: of the default generator afterwards.
        markers: how often the operation ran that ends every region.
        reached: whether a gradient reached the result of a region, if a `Spy` was looking.
        scale: bound of the contributions to any number.
    """

    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    state: torch.Tensor
    markers: int
    reached: bool
    scale: float


def apply(program: Program, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` under a transform."""
    library = LIBRARIES[program.library]

    def like(tree: Any, start: float) -> Any:
        return pytree.tree_map(lambda t: numbers(*t.shape, start=start), tree)

    if name == "grad":
        return library.grad(lambda x: total(f(x)))
    if name == "vmap":
        return library.vmap(f, randomness=program.randomness)
    if name == "jvp":
        return lambda x: library.jvp(f, (x,), (like(x, 0.5),))
    if name == "jacfwd":
        return library.jacfwd(f, randomness=program.randomness)
    if name == "jacrev":
        return library.jacrev(f)

    def vjp(x: torch.Tensor) -> Any:
        output, pullback = library.vjp(f, x)
        return output, pullback(like(output, 0.7))

    return vjp


def reference(program: Program) -> Result:
    """The program without remat."""
    return run(program, Spy(), measure=True)


def run(program: Program, remat: Callable[..., Any], *, measure: bool = False) -> Result:
    """The program, and plain autograd through what comes out."""
    torch.manual_seed(1)
    env = Env(program.randomness)
    namespace = {"torch": torch, "functx": functx, "functools": functools}
    exec(compile(program.source, "<program>", "exec"), namespace)
    f = namespace["build"](remat, env)

    def only_floats(x: torch.Tensor) -> Any:
        return f(x)

    stacked: Callable[..., Any] = remat(only_floats) if 0 in program.places else only_floats
    for place, name in enumerate(program.stack, start=1):
        stacked = apply(program, name, stacked)
        if place in program.places:
            stacked = remat(stacked)
    x = numbers(*(2,) * program.stack.count("vmap"), 3).requires_grad_()
    torch.manual_seed(2)
    with Watch(measure) as watch:
        values, gradients = _differentiate(stacked, x, env.parameters)
    values.append(env.buffer)
    return Result(
        values,
        gradients,
        torch.get_rng_state(),
        watch.markers,
        getattr(remat, "reached", False),
        watch.total,
    )


def _differentiate(f: Any, x: torch.Tensor, leaves: list[torch.Tensor]) -> Any:
    values = pytree.tree_leaves(f(x))
    value = total(values)
    if not value.requires_grad:
        return [v.detach() for v in values], []
    gradients = torch.autograd.grad(value, [x, *leaves], allow_unused=True, materialize_grads=True)
    return [v.detach() for v in values], list(gradients)


def plain(f: Any, **options: Any) -> Any:
    """In the place of remat."""
    return f


class Spy:
    """In the place of remat: notes whether a gradient reaches the result of a region.

    Then the operation that ended the region, whose derivative reads its result, has to run again.
    """

    def __init__(self) -> None:
        self.reached = False

    def __call__(self, f: Any, **options: Any) -> Any:
        if isinstance(f, nn.Module):
            return f

        def region(*args: Any, **kwargs: Any) -> Any:
            out = f(*args, **kwargs)
            first = out[0] if isinstance(out, tuple) else out
            node = first.grad_fn if isinstance(first, torch.Tensor) else None
            if node is not None and node.name() == "SigmoidBackward0":
                first.register_hook(self._reach)
            return out

        return region

    def _reach(self, gradient: torch.Tensor) -> None:
        self.reached = True


def compare(program: Program, ours: Result, expected: Result) -> None:
    """Raise `Difference` where they differ.

    Values that only forward passes made are equal bit by bit. Gradients may add up the same
    contributions in another order: they are within 8 roundings of the sum of absolute
    contributions, which the sum of all that any operation made bounds.
    """
    bound = ROUNDINGS * EPS * expected.scale
    forward = set(program.stack) <= FORWARD and "inner transform" not in program.features
    pairs = [("value", forward, ours.values, expected.values)]
    pairs += [("gradient", False, ours.gradients, expected.gradients)]
    for what, bitwise, actual, wanted in pairs:
        if len(actual) != len(wanted):
            raise Difference(f"{len(actual)} {what}s instead of {len(wanted)}")
        for i, (a, b) in enumerate(zip(actual, wanted)):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise Difference(f"{what} {i} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}")
            if torch.equal(a, b):
                continue
            error = (a - b).abs().max().item()
            if bitwise or not error <= bound:
                raise Difference(f"{what} {i} is off by {error:.3g}, allowed is {bound:.3g}")
    if not torch.equal(ours.state, expected.state):
        raise Difference("the default generator is somewhere else")
    if expected.reached and ours.markers <= expected.markers:
        raise Difference(f"nothing was recomputed: regions ended {ours.markers} times in all")
