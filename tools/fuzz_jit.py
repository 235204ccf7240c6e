"""Random programs with state, hooks, writes, aliases and random numbers, in eager and by jit.

    python -m tools.fuzz_jit --count 1000 --seed 0

Each program is a function that reads and writes a world of objects. It is called three times, and
the world changes in between. What can be seen (results, gradients, the world, the generator) must
be the same in eager and under `functx.jit`, or a `functx.TracingError`. The last lines say how
many programs ran compiled, ran in eager with a warning, or were refused. A difference prints the
program.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import textwrap
import warnings
from typing import Any

import torch

import functx
from functx._core import compiler_warnings

PRELUDE = """
import types
import torch
from torch import nn
from torch.nn import functional as F
import functx

def values(*shape, start=0.0):
    count = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64)
    return (count + start).reshape(shape).sin()

class Shared:
    k = 2.0

class Slots:
    __slots__ = ("k", "w")

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.sin()

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0].cos()

def root():
    o.root = values(4, 3).requires_grad_()
    return o.root

G = 2.0
o = types.SimpleNamespace(k=2.0, n=0, flag=True, last=None)
o.w = values(3).requires_grad_()
o.b = values(4, 3, start=2.0)
o.d = {"k": 1.5, "w": values(3, start=5.0).requires_grad_()}
o.l = [1.0, values(3, start=7.0)]
o.s = Slots()
o.s.k, o.s.w = 0.5, values(3, start=9.0).requires_grad_()
o.bn = nn.BatchNorm1d(3).double()
o.net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
with torch.no_grad():
    for p in o.net.parameters():
        p.copy_(values(*p.shape))
o.g = torch.Generator().manual_seed(3)
o.h = o.w * 2
region = functx.remat(lambda t: (t * o.w).sin())
"""
READS = (
    *("{t} * o.k", "{t} + o.w", "{t} * o.d['k']", "{t} * o.d['w']", "{t} * Shared.k", "{t} * G"),
    *("{t} * o.s.k", "{t} * o.s.w", "{t} + o.b", "{t} * o.l[0] + o.l[-1]", "{t} * len(o.l)"),
    *("{t} * (2 if o.flag else 3)", "{t} * o.h", "o.bn({t})", "o.net({t})", "region({t})"),
    *("{t} * Double.apply(o.w)", "{t} * o.w.detach()", "{t} * (1 + o.w.requires_grad)"),
    *("functx.grad(lambda u: (u * o.w).sin().sum())({t})", "{t} if {t} is x else {t} * 2"),
    *("{t} * functx.vmap(lambda u: u * o.k)(o.w)", "sum(({t} * u for u in o.l), {t})"),
)
PURE = (
    *("{t}.sin()", "{t} * {u}", "{t} + {u}.tanh()", "{t}.detach() + {u}", "{t}.clone()"),
    *("{t}.view(-1).view(4, 3)", "{t}.flip(0)", "{t}[:]", "torch.where({t} > 0, {t}, {u})"),
    *("{t}.t().contiguous().t()", "{t} - {t}.mean(0)", "torch.cat([{t}[:2], {u}[2:]])"),
)
DRAWS = (
    *("{t} * torch.rand_like({t})", "F.dropout({t}, 0.5)", "{t} + torch.randn(3).double()"),
    *("{t} * torch.rand(3, generator=o.g).double()", "F.dropout({t}, 0.5) * 0 + {t}"),
)
WRITES = (
    *("o.b.add_({t}.detach())", "o.b.copy_({t})", "o.b[0] = {t}[0]", "x.add_(1)", "{t}.mul_(2)"),
    *("o.b.mul_(0.5)", "x[1].copy_({t}[0].detach())", "o.b.view(-1)[:3].zero_()", "{t}.tanh_()"),
    *("x.mul_(o.w)", "o.l[-1].add_(1)", "torch.add({t}.detach(), 1, out=o.b)"),
)
HOOKS = (
    # (Of a copy: torch crashes in eager where the tensor is a view, and its base was written.)
    "{t} = {t} * 1\n{t}.register_hook(lambda g: g * 3) if {t}.requires_grad else None",
    "{t} = torch.autograd.grad(({t} * o.w).sin().sum(), o.w, create_graph=True)[0] + {t}",
)
EFFECTS = (
    *("o.n += 1", "o.last = {t}", "o.l.append(1.0)", "torch.manual_seed(3)", "o.k = o.k + 1"),
    *("o.w.register_hook(lambda g: g)", "{t}.sum().item()", "o.b.tolist()", "x.unsqueeze_(0)"),
    *("o.flag = not o.flag", "o.b = {t}", "o.g.manual_seed(1)", "o.d.update(z={t})"),
)
RESULTS = (
    *("{t}", "{t}, {u}", "{t}, {t}", "{t}, {t}.view(-1)", "{t}, {t}.detach()", "x, {t}"),
    *("{t}, o.w", "{{'a': {t}, 'b': [{u}, o.k]}}", "{t}[:2], {t}[1:]", "o.b, {t}"),
)
CHANGES = (
    *("o.k = 3.0", "o.w = values(3, start=11.0).requires_grad_()", "o.flag = not o.flag"),
    *("o.d['k'] = 2.5", "o.l.append(0.5)", "o.l[0] = 4.0", "o.net.eval()", "o.bn.eval()"),
    *("Shared.k = 3.0", "G = 3.0", "o.s.k = 0.7", "o.h = o.w * 3", "o.w.requires_grad_(False)"),
    "o.s.w = values(3, start=12.0).requires_grad_()",
    # (An unused result that reads it calls a hook without a gradient.)
    "o.w.register_hook(lambda g: g if g is None else g * 7) if o.w.requires_grad else None",
    "o.d['w'] = o.w",
    "o.b = values(4, 3, start=4.0)",
    "o.w.data.mul_(0.5)",
    "o.net[0].weight = nn.Parameter(values(3, 3, start=6.0))",
    "o.net[0].register_forward_hook(lambda m, a, out: out * 2)",
    "o.g = torch.Generator().manual_seed(9)",
    "torch.manual_seed(5)",
    "vars(o)['k'] = 5.0",
    "o.l.pop() if len(o.l) > 2 else None",
)
ARGUMENTS = (
    *("values(4, 3)", "values(4, 3).requires_grad_()", "root() * 1"),
    *("values(6, 3)[1:5]", "o.b", "values(3, 4).t()", "values(4, 3)"),
)


def written(choose: random.Random) -> str:
    """The source of a program: a function, and three calls of it."""
    lines, names = [], ["x"]

    def filled(text: str) -> str:
        return text.format(t=choose.choice(names[-2:]), u=choose.choice(names))

    for i in range(choose.randint(2, 6)):
        kinds = [READS, READS, PURE, PURE, DRAWS]
        lines.append(f"t{i} = {filled(choose.choice(choose.choice(kinds)))}")
        names.append(f"t{i}")
        if choose.random() < 0.25:
            lines.append(filled(choose.choice(WRITES)))
        if choose.random() < 0.1:
            lines.append(filled(choose.choice(HOOKS)))
        if choose.random() < 0.03:
            lines.append(filled(choose.choice(EFFECTS)))
    lines.append(f"return {filled(choose.choice(RESULTS))}")
    body = textwrap.indent("\n".join(lines), "    ")
    calls = []
    argument = choose.choice(ARGUMENTS)
    for _ in range(3):
        if choose.random() < 0.2:
            argument = choose.choice(ARGUMENTS)
        calls.append(f"call(jitted, {argument}{', grad=False' if choose.random() < 0.15 else ''})")
        calls += choose.choices(CHANGES, k=choose.randint(0, 2))
    return f"def f(x):\n{body}\n\njitted = jit(f)\n" + "\n".join(calls) + "\n"


def shown(x: Any) -> Any:
    """What can be seen of a value, rounded."""
    if isinstance(x, torch.Tensor):
        numbers = [round(v, 7) + 0.0 for v in x.detach().double().reshape(-1).tolist()]
        return tuple(x.shape), x.requires_grad, numbers
    if isinstance(x, (list, tuple)):
        return [shown(v) for v in x]
    return {k: shown(v) for k, v in x.items()} if isinstance(x, dict) else x


def gradients_of(found: Any) -> Any:
    """Gradients; none is zero, since one node of autograd stands for the whole function."""
    return shown([g for g in found if g is not None and g.count_nonzero()])


def told(source: str, jit: Any) -> list[Any]:
    """Run a program; returns all that can be seen, or the error at the end."""
    found: list[Any] = []
    space: dict[str, Any] = {"jit": jit}
    exec(PRELUDE, space)
    o = space["o"]

    def call(f: Any, x: torch.Tensor, grad: bool = True) -> None:
        with torch.set_grad_enabled(grad):
            out = f(x)
        parts = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        found.append(shown(out))
        leaves = [o.w, o.d["w"], o.s.w, *o.net.parameters(), getattr(o, "root", o.w)]
        leaves = [t for t in (*leaves, *([x] if x.is_leaf else [])) if t.requires_grad]
        roots = [t for t in parts if t.requires_grad]
        if roots and leaves:
            total = sum((i + 1) * t.sin().sum() for i, t in enumerate(roots))
            gradients = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
            found.append(gradients_of(gradients))
        if o.b.requires_grad and leaves:
            of_b = o.b.sin().sum()
            gradients = torch.autograd.grad(of_b, leaves, allow_unused=True, retain_graph=True)
            found.append(gradients_of(gradients))
            o.b = o.b.detach()
        found.append(shown([x, o.b, o.l, o.k, o.n, o.flag, o.bn.running_mean]))
        found.append(torch.rand(1).item())

    space["call"] = call
    torch.manual_seed(0)
    try:
        exec(source, space)
    except Exception as error:
        found.append(error)
    return found


def judged(source: str) -> tuple[str, str]:
    """The outcome of a program, and the difference, if there is one."""
    compiler_warnings._told.clear()
    graphs: list[Any] = []

    def jit(f: Any) -> Any:
        return functx.jit(f, backend=lambda module, _: graphs.append(module) or module)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected = told(source, lambda f: f)
        found = told(source, jit)
    one, other = expected[-1], found[-1]
    if isinstance(other, functx.TracingError):
        same = expected[: len(found) - 1] == found[:-1]
        return ("refused", str(other)) if same else ("silent", "before an error")
    if isinstance(one, Exception) or isinstance(other, Exception):
        if isinstance(one, Exception) and isinstance(other, Exception):
            return "fails in both", str(one)
        return "fails", f"{one!r} in eager, {other!r} by jit"
    if expected != found:
        place = next(i for i, (a, b) in enumerate(zip(expected, found)) if a != b)
        return "silent", f"eager {expected[place]}\njit   {found[place]}"
    if any("runs in eager" in str(w.message) for w in caught):
        return "in eager", ""
    return "compiled", ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_jit", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", default="silent,fails", help="outcomes to print")
    options = parser.parse_args()
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in range(options.seed, options.seed + options.count):
        source = written(random.Random(seed))
        outcome, said = judged(source)
        outcomes[outcome] += 1
        if outcome in options.show.split(","):
            print(f"-- seed {seed}: {outcome}: {said}\n{source}", flush=True)
    for outcome, count in outcomes.most_common():
        print(f"{outcome}: {count} of {options.count}, {count / options.count:.1%}")
    return int(outcomes["silent"] + outcomes["fails"] > 0)


if __name__ == "__main__":
    sys.exit(main())
