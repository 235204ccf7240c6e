"""Claim: a warm call of a jitted function costs what one of ``torch.compile`` does.

What is timed is everything but the graph: both compile to a function that returns a result which it
has kept. For ``torch.compile`` that is AOTAutograd with such compilers for forward and backward.
GPT-2 has regions under `functx.jit`, and none under ``torch.compile``. CPU time of one thread, in
turns, the least of several.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import functx
from bench._common import Column, Result, device_argument, environment, least_seconds, one_thread

NAME = "jit_calls"
CLAIM = "CPU time of a warm call beside its graph, next to torch.compile, one thread"
REPEATS, CALLS = 40, 25


def kept(module: Any, _: Any = None) -> Callable[..., Any]:
    """A backend whose code returns what it has computed in the first call."""
    found: list[Any] = []

    def run(*args: Any) -> Any:
        if not found:
            found.append(module(*args))
        return found[0]

    return run


def compiled(f: Any) -> Any:
    """A function by torch.compile, with such a backend."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(module: Any, _: Any) -> Any:
        return make_boxed_func(kept(module))

    return torch.compile(f, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))


def three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a * b + c


def gpt2(regions: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=48, n_head=4, n_layer=12, vocab_size=64, n_positions=32, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    if regions:
        functx.apply_remat(model, type(model.transformer.h[0]))
    return lambda ids: model(input_ids=ids).logits


def timed(name: str, ours: Any, theirs: Any, args: Any, grad: bool) -> dict[str, Any]:
    """A row: calls of one function by both, in turns."""

    def calls(f: Any) -> None:
        with torch.set_grad_enabled(grad):
            for _ in range(CALLS):
                f(*args)

    for f in filter(None, (ours, theirs)):
        calls(f)  # the first ones compile
    runs = [functools.partial(calls, f) for f in (ours, theirs) if f is not None]
    seconds = [t / CALLS for t in least_seconds(runs, REPEATS, time.process_time)]
    row: dict[str, Any] = {"program": name, "grad": "yes" if grad else "no", "jit": seconds[0]}
    if theirs is not None:
        row |= {"compile": seconds[1], "ratio": seconds[0] / seconds[1]}
    return row


def first_trace(f: Any, args: Any) -> float:
    """CPU seconds of a first call; what it computes is not compiled."""
    jitted = functx.jit(f, backend=lambda module, _: module)
    start = time.process_time()
    jitted(*args)
    return time.process_time() - start


@one_thread()
def run(device: torch.device) -> Result:
    torch.manual_seed(0)
    linears = nn.Sequential(*(nn.Linear(8, 8) for _ in range(64)))
    ids, x = torch.randint(0, 64, (1, 16)), torch.randn(2, 8)
    plain = [torch.randn(4) for _ in range(3)]
    leaves = [t.clone().requires_grad_() for t in plain]
    gpt = gpt2(True)
    rows: list[dict[str, Any]] = []
    pairs: list[Any] = [
        ("three tensors", three, three, (plain, leaves)),
        ("64 linear layers", linears, linears, ((x,), (x,))),
        ("GPT-2, 12 layers, regions", gpt, gpt2(False), ((ids,), (ids,))),
    ]
    for name, ours, theirs, args in pairs:
        jitted, other = functx.jit(ours, backend=kept), compiled(theirs)
        for grad in (False, True):
            rows.append(timed(name, jitted, other, args[grad], grad))
    inside = functx.jit(linears, backend=kept)
    gradient = functx.grad(lambda x: inside(x).sum())
    rows.append(timed("functx.grad of 64 jitted layers", gradient, None, (x,), True))
    columns = [
        Column("program", "program"),
        Column("grad", "with gradients"),
        Column("jit", "functx.jit, us", ".1f", 1e-6),
        Column("compile", "torch.compile, us", ".1f", 1e-6),
        Column("ratio", "ratio", ".2f"),
    ]
    note = f"The first trace of GPT-2 with gradients takes {first_trace(gpt, (ids,)):.1f} s."
    versions = environment(device, "transformers")
    return Result(NAME, CLAIM + ".", columns, rows, [note], versions)


if __name__ == "__main__":
    result = run(device_argument(NAME, CLAIM))
    result.write()
    result.show()
