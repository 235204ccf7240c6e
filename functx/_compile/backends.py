"""Compiles a graph, so that its order and its recompute stay what they are.

NOTE [stages]
Inductor fuses loops that read the same memory: the norm of a forward with that of its recompute,
which then lives from the forward on. So nodes note their stage, a run of one phase of one region,
and whether it is a forward. Fused is what is of one stage, or read by the next, if no forward's.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from functx import _torch
from functx._compile.tracing import Traced
from functx._core import LiveStorages
from functx._torch import compiler

# Inductor would move a recompute to its operands, or schedule it early. Memory is laid out as in
# eager: copies with channels last would live on. Random numbers come from torch's generators.
INDUCTOR = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "layout_optimization": False,
    "fallback_random": True,
}


def compiled(
    traced: Traced, backend: Any, is_plain: bool = False
) -> Callable[[list[Any]], list[Any]]:
    """What runs a graph: from a list of tensors and sizes, which it empties, to its results.

    A plain graph writes to no input and returns none, and so needs no alias of an input.
    """
    n_kept = traced.keep_draws() if isinstance(backend, str) else 0
    module, examples = traced.module(), traced.examples()
    _note_stages(module.graph)
    notice = noticed("functx.jit: compiling", module.graph)
    # Casts of autocast are in the graph; others would be added to what runs without autocast.
    outside = _torch.without_dispatch_modes(), _torch.cleared_interpreter_stack()
    with notice, outside[0], outside[1], torch.no_grad(), _torch.without_autocast():
        if backend == "inductor":
            boxed = compiler.inductor(module, examples, INDUCTOR)
        else:
            known = compiler.load().lookup_backend(backend) if isinstance(backend, str) else backend
            boxed = _boxed(known(module, examples))

    def ended(results: list[Any]) -> list[Any]:
        return results[: len(results) - n_kept] if n_kept else results

    def call(args: list[Any]) -> list[Any]:
        if is_plain and not _torch.dispatch_depth() and not _torch.any_autocast():
            grad = torch.is_grad_enabled()
            _torch.set_grad_enabled(False)
            try:
                return ended([*boxed(args)])
            finally:
                _torch.set_grad_enabled(grad)
        modes = map(_torch.dispatch_mode_at, range(_torch.dispatch_depth()))
        if backend == "inductor" and any(isinstance(mode, LiveStorages) for mode in modes):
            raise TypeError(
                "functx.jit: what inductor compiles can't be followed. For functx.memory pass the "
                "jitted function as an argument of what is measured; for functx.saved_residuals "
                'use backend="aot_eager", which saves the same.'
            )
        if not is_plain:
            args[:] = [t.detach() if isinstance(t, Tensor) else t for t in args]
        with torch.no_grad(), _torch.without_autocast():
            return ended([*boxed(args)])

    return call


@contextmanager
def noticed(what: str, graph: fx.Graph) -> Iterator[None]:
    """Say on stderr what is being done to a graph, if it takes more than two seconds."""
    text = f"{what} a graph of {len(graph.nodes)} operations ...\n"
    timer = threading.Timer(2.0, sys.stderr.write, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _boxed(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    def boxed(args: list[Any]) -> Any:
        given = args[:]
        args.clear()
        return run(*given)

    return boxed


def _note_stages(graph: fx.Graph) -> None:
    """See NOTE [stages]."""

    def stage(node: fx.Node) -> tuple[Any, Any]:
        custom = node.meta.get("custom", {})
        return custom.get("functx_region"), custom.get("functx_phase")

    for number, ((_, phase), nodes) in enumerate(itertools.groupby([*graph.nodes], stage)):
        for node in nodes if phase else ():
            node.meta["custom"] |= {compiler.STAGE: (number, phase == "forward")}
