"""Random stacks of transforms around regions, traced in four ways, compared with eager.

    python -m tools.fuzz_traced --count 1000 --seed 0 [--ways real,fake,symbolic,jit]

Each program is a stack of up to three transforms around some steps, some of them in regions, and
the gradients of all of it. It is traced by ``make_fx`` on real, fake and symbolic tensors, and by
``functx.jit(dynamic=True)``, which is also called with more rows. The graph must give what eager
gives by `torch.func` without regions, and random numbers of the same generator. Where torch can't
trace, or run, the same without regions, an error is no difference. The last lines count the
outcomes. A difference prints the program.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import functx

WAYS = ("real", "fake", "symbolic", "jit")
NAMES = ("grad", "vmap", "jvp")
STACKS = [s for n in (1, 2, 3) for s in itertools.product(NAMES, repeat=n) if s.count("jvp") < 2]
EPS = 2.0**16  # units of rounding by which a result may differ
TRACED, FAILS, WRONG, REFUSED = "the same", "fails", "differs", "refused in words"
BOTH, ONE_SIZE = "torch fails, too", "the same, and torch fails, too, at another size"

# Of two inputs, rows of four numbers and a matrix, and of a captured row.
STEPS = (
    *("x @ w", "F.linear(x, w)", "F.linear(x, w, w[1])", "x.sin() * w[0]", "x * x.sum(0)"),
    *("x - x.mean(-1, keepdim=True)", "x.reshape(-1).view(x.shape).exp().reciprocal()"),
    *("(x.reshape(-1, 4) @ w.mT).view(x.shape)", "x.mT.contiguous().mT.tanh()", "x * CAPTURED"),
    *("x.clone().mul_(0.5).add_(w[1])", "F.softmax(x, -1) * x", "x / (1 + x.square().sum())"),
    *("torch.cat([x[..., 2:], x[..., :2]], -1) + x.flip(-1)", "written(x, w)", "torch.tanh(x)"),
    *("x.unbind(0)[0] * x", "torch.where(x > 0, x, w[2])", "x.cumsum(0)"),
    *("x * torch.rand_like(x)", "F.dropout(x, 0.5)"),
    *("F.layer_norm(x, (4,), w[0], w[1])", "(x[:, None] * x[None]).amax(1)", "x + len(x)"),
    *("torch.einsum('ij,kj->ik', x, w)", "x.detach() * x", "F.gelu(x, approximate='tanh')"),
    *("torch.matmul(x.unsqueeze(1), w).squeeze(1)", "x.split(2, -1)[1].repeat(1, 2) * w[3]"),
)
POLICIES = (None, None, "dots_saveable", "everything_saveable")
CAPTURED = torch.linspace(-1, 1, 4, dtype=torch.float64)


def written(x: Any, w: Any) -> Any:
    """A tensor of zeros that is filled."""
    y = torch.zeros_like(x)
    y[:, :2] = (x @ w)[:, :2]
    y[0] += x[0]
    return y


def rows(*shape: int) -> torch.Tensor:
    """Fixed numbers of some irregularity in [-1, 1]."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.cos(count * 1.7).reshape(shape)


WEIGHT = rows(4, 4)


def transformed(library: Any, name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` under one transform."""
    if name == "grad":
        return library.grad(lambda x: f(x).square().sum())
    if name == "vmap":
        return library.vmap(f, randomness="different")
    return lambda x: library.jvp(f, (x,), (x * 0.5 + 1,))[1]


def stacked(
    f: Callable[..., Any], stack: tuple[str, ...], library: Any = functx
) -> Callable[..., Any]:
    """The gradients of a stack of transforms around ``f``, by the input and by a weight."""

    def loss(x: Any, weight: Any) -> Any:
        g = lambda x: f(x, weight)
        for name in reversed(stack):
            g = transformed(library, name, g)
        return g(x).square().sum()

    return library.grad(loss, (0, 1))


def argument(stack: tuple[str, ...], n: int = 3) -> torch.Tensor:
    """What a stack is called with."""
    return rows(*(2,) * stack.count("vmap"), n, 4)


@dataclass
class Program:
    """Steps before, inside and after a region, perhaps one in it; around all a stack."""

    parts: list[list[str]]
    nested: bool
    captures: bool  # the region reads the weight from outside
    policy: str | None
    stack: tuple[str, ...]

    def function(self, region: Callable[..., Any]) -> Callable[..., Any]:
        """What it computes."""
        before, inner, after = (list(map(_step, part)) for part in self.parts)

        def run(steps: Any, x: Any, w: Any) -> Any:
            for step in steps:
                x = step(x, w)
            return x

        def outer(x: Any, w: Any) -> Any:
            inside = lambda x, w: run(inner, x, w)
            return (region(inside) if self.nested else inside)(run(before, x, w), w)

        def whole(x: Any, w: Any) -> Any:
            y = region(lambda x: outer(x, w))(x) if self.captures else region(outer)(x, w)
            return torch.tanh(run(after, y, w))

        return whole

    def with_regions(self) -> Callable[..., Any]:
        """With functx's regions and transforms."""
        policy = self.policy and getattr(functx.checkpoint_policies, self.policy)
        f = self.function(lambda g: functx.remat(g, policy=policy))
        return stacked(f, self.stack)

    def plain(self) -> Callable[..., Any]:
        """Without regions, by torch's transforms; these have wrong derivatives of norms."""
        normalized = "layer_norm" in str(self.parts)
        return stacked(self.function(lambda g: g), self.stack, functx if normalized else torch.func)


def _step(text: str) -> Callable[..., Any]:
    scope = {"torch": torch, "F": F, "written": written, "CAPTURED": CAPTURED}
    found: Callable[..., Any] = eval(f"lambda x, w: {text}", scope)
    return found


def written_for(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    parts = [draw.choices(STEPS, k=draw.randint(*few)) for few in ((1, 2), (1, 2), (0, 1))]
    nested, captures, policy = draw.random() < 0.5, draw.random() < 0.3, draw.choice(POLICIES)
    depth = draw.choice((1, 2, 2, 3))
    stack = draw.choice([s for s in STACKS if len(s) == depth])
    return Program(parts, nested, captures, policy, stack)


def run(f: Callable[..., Any], x: torch.Tensor) -> Any:
    """What a function or graph gives, from the same random numbers."""
    torch.manual_seed(0)
    return f(x, WEIGHT)


def traced(f: Callable[..., Any], way: str, x: torch.Tensor) -> Callable[..., Any]:
    """The graph of ``f``."""
    if way == "jit":
        return functx.jit(f, dynamic=True, backend=lambda module, _: module)
    return make_fx(f, tracing_mode=way, _allow_non_fake_inputs=True)(x, WEIGHT)


def judged(program: Program, way: str, eager: dict[int, Any] | None = None) -> tuple[str, str]:
    """The outcome of a program, and what differs; results of eager are shared by ways."""
    eager = {} if eager is None else eager
    plain, sizes = program.plain(), (3, 5) if way in ("symbolic", "jit") else (3,)
    with _dispatch_keys_kept(), _without_logs():
        try:
            for n in sizes:
                if n not in eager:
                    eager[n] = run(plain, argument(program.stack, n))
        except Exception as error:
            return BOTH, f"in eager: {error!r}"
        graphs = dict[str, Any]()
        for n in sizes:
            x = argument(program.stack, n)
            try:
                if "" not in graphs:
                    graphs[""] = traced(program.with_regions(), way, x)
                found = run(graphs[""], x)
            except Exception as error:
                try:
                    if "plain" not in graphs:
                        graphs["plain"] = traced(plain, way, argument(program.stack))
                    run(graphs["plain"], x)
                except Exception:
                    return BOTH if n == sizes[0] else ONE_SIZE, repr(error)
                refused = isinstance(error, functx.RematError | functx.TracingError)
                return REFUSED if refused else FAILS, f"{n} rows: {error!r}"
            if said := difference(found, eager[n]):
                return WRONG, f"{n} rows: {said}"
    return TRACED, ""


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Torch prints a long trace of C++ where it can't trace an operation."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _dispatch_keys_kept() -> Iterator[None]:
    """Torch leaves its own keys behind where a trace fails inside of transforms."""
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*keys):
        yield


def difference(found: Any, expected: Any) -> str:
    """What differs; where eager gives NaN, nothing does."""
    for i, (one, other) in enumerate(zip(found, expected)):
        if one.shape != other.shape:
            return f"gradient {i} is of shape {one.shape}, not {other.shape}"
        scale = max(1.0, other.abs().max().item())
        bound = EPS * torch.finfo(other.dtype).eps * scale
        error = (one - other).abs().max().item()
        if other.isfinite().all() and not error <= bound:
            return f"gradient {i} by {error:.3g} of {scale:.3g}"
    return ""


def main() -> int:
    """Judge programs, and print what differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_traced", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
    bad = 0
    for seed in range(options.seed, options.seed + options.count):
        program, eager = written_for(seed), dict[int, Any]()
        for way in options.ways.split(","):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome, said = judged(program, way, eager)
            outcomes[way, outcome] += 1
            bad += outcome in (FAILS, WRONG)
            if outcome in (FAILS, WRONG, REFUSED):
                print(f"-- seed {seed}, {way}: {outcome}: {said}\n{program}", flush=True)
    for (way, outcome), count in sorted(outcomes.items()):
        print(f"{way}: {outcome}: {count} of {options.count}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
