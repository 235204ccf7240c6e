"""What random programs find: leaves, modules, generators, custom Functions, hooks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cases import DTYPE, numbers
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import functx

from .counting import Counter, Counts, count, one_more
from .functions import OldStyle, Own, Pair, scaled


class Holder:
    """A callable object with attributes."""

    def __init__(self, f: Any, n: int, flag: bool) -> None:
        self.f, self.n, self.flag = f, n, flag

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.f(*tensors, n=self.n, flag=self.flag)


class Inner(nn.Module):
    """A module with a region inside."""

    def __init__(self, remat: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 3, start=5.0))
        self.bias = nn.Parameter(numbers(3, start=6.0))
        self._remat = remat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(torch.nn.functional.linear(x, self.weight, self.bias).tanh())

        return self._remat(region)(x) * self.bias


class Turning(nn.Module):
    """A module that binds its buffer anew, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", numbers(3, start=8.0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.state = self.state * 0.5 + x.detach() * 0.25
        return torch.sigmoid(x * self.state)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=DTYPE)
        self.second = nn.Linear(3, 3, dtype=DTYPE)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Symmetric(nn.Module):
    """Of a matrix, one that is as its transpose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


class Subclass(torch.Tensor):
    """A tensor of a class of its own."""


class FunctionMode(TorchFunctionMode):
    """Takes another function for one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.sinh:
            func = torch.Tensor.sin
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """Sees what runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another one is the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _double(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 1.5


class Env:
    """What programs find.

    Args:
        randomness: of each vmap.
        remat: `functx.remat`, or what stands in its place.
        loops: whether loops of functx run, or plain ones.
        frozen: the leaf that wants no gradient, if one does not.
    """

    function = staticmethod(Own.apply)
    pair = staticmethod(Pair.apply)
    old_style = staticmethod(OldStyle.apply)
    counter = Counter
    counted_by_a_function = staticmethod(Counts.apply)
    holder = Holder
    operator = staticmethod(scaled)
    subclass = Subclass
    function_mode = FunctionMode
    dispatch_mode = DispatchMode
    default_dtype = staticmethod(default_dtype)

    def __init__(
        self, randomness: str, remat: Callable[..., Any], loops: bool, frozen: int | None = None
    ) -> None:
        self.randomness = randomness
        self.loops = loops
        self._frozen = frozen
        self._asked = 0
        self.leaves: list[torch.Tensor] = []
        self.box: list[torch.Tensor] = []
        # That a function closes over: replays write to another one.
        self.kept: dict[str, Any] = {"list": [], "counts": []}
        self.kept["self"] = self.kept
        self.generator = torch.Generator().manual_seed(3)
        self.buffer = numbers(3, start=4.0)
        self.constant = numbers(3, start=7.0)
        self.linear = nn.Linear(3, 3, dtype=DTYPE)
        self.mlp = nn.Sequential(
            nn.Linear(3, 4, dtype=DTYPE), nn.Tanh(), nn.Linear(4, 3, dtype=DTYPE)
        )
        self.noisy = nn.Sequential(nn.Linear(3, 3, dtype=DTYPE), nn.Dropout(0.4), nn.Tanh())
        self.norm = nn.BatchNorm1d(3, momentum=0.3, dtype=DTYPE)
        self.single = nn.Linear(3, 3)
        self.inner = Inner(remat)
        self.turning = Turning()
        self.tied = Tied()
        self.symmetric = nn.Linear(3, 3, dtype=DTYPE)
        parametrize.register_parametrization(self.symmetric, "weight", Symmetric())
        self.spectral = spectral_norm(nn.Linear(3, 3, dtype=DTYPE))
        self.frozen = nn.Linear(3, 3, dtype=DTYPE)
        self.frozen.weight.requires_grad_(False)

    def leaf(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A leaf that wants a gradient."""
        leaf = numbers(*shape, start=1.0 + len(self.leaves))
        leaf.requires_grad_(len(self.leaves) != self._frozen)
        self.leaves.append(leaf)
        return leaf

    def hook(self, t: torch.Tensor) -> None:
        """A hook that changes the gradient."""
        if t.requires_grad:
            t.register_hook(_double)

    def counted_by_a_hook(self, t: torch.Tensor, state: Any) -> torch.Tensor:
        """A hook that counts its calls."""
        t = t.sin()
        if t.requires_grad:
            t.register_hook(lambda g: g * one_more(state))
        return t

    def collect_garbage(self) -> None:
        """What only garbage held goes."""
        gc.collect()

    def every_other(self, ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
        """A policy that decides otherwise each time it is asked."""
        self._asked += 1
        return self._asked % 2 == 1

    def sequential(self, functions: Any, segments: int, x: Any) -> Any:
        """`functx.remat_sequential`, or a plain loop."""
        if self.loops:
            return functx.remat_sequential(functions, segments, x)
        for f in functions:
            x = f(x)
        return x

    def scan(self, body: Any, carry: Any, xs: torch.Tensor, slots: int) -> Any:
        """`functx.remat_scan`, or a plain loop."""
        if self.loops:
            return functx.remat_scan(body, carry, xs, slots=slots)
        outputs = []
        for x in xs.unbind(0):
            carry, y = body(carry, x)
            outputs.append(y)
        return carry, torch.stack(outputs)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What is differentiated for, beside the input."""
        nets = [self.linear, self.mlp, self.noisy, self.norm, self.single, self.inner]
        nets += [self.tied, self.symmetric, self.spectral, self.frozen]
        return [*self.leaves, *nn.ModuleList(nets).parameters()]

    @property
    def state(self) -> list[torch.Tensor]:
        """What programs write to."""
        counts = torch.tensor([len(self.kept["list"]), self.turning.calls])
        buffers = [self.buffer, *self.norm.buffers(), self.turning.state]
        buffers += self.spectral.buffers()
        passes = torch.tensor([count(state) for state in self.kept["counts"][:1]])
        return [*buffers, self.generator.get_state(), counts, passes]
