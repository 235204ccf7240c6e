"""Compiles a graph so that its order and its recompute are kept.

NOTE [stages]
Inductor fuses loops that read the same memory. It would fuse, for example, a norm of the forward
with the same norm in the recompute. The recomputed value would then be alive from the forward on,
which defeats the recompute. So each node notes its stage: a run of one phase of one region, and
whether that is a forward. Loops are fused within one stage, or with the next stage if neither
belongs to a forward.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from functx import _torch
from functx._compile.tracing import Traced
from functx._core import LiveStorages
from functx._torch import compiler

# The first two passes would move a recompute to its operands, or schedule it early. Layouts stay as
# in eager, since copies in channels-last layout would stay alive. Random numbers must come from
# torch's generators, as in eager.
INDUCTOR = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "layout_optimization": False,
    "fallback_random": True,
}


@dataclass(frozen=True)
class Inductor:
    """The inductor backend with options, by name, that the user has given."""

    options: tuple[tuple[str, Any], ...]


def checked_backend(backend: Any, mode: str | None, options: Mapping[str, Any] | None) -> Any:
    """The backend of `functx.jit` with ``mode=`` and ``options=``, as in ``torch.compile``.

    Raises:
        ValueError: The mode or option does not exist, or conflicts with what functx guarantees.
    """
    if mode is None and options is None:
        return backend
    if backend != "inductor":
        raise ValueError("functx.jit: mode= and options= are for the backend inductor only.")
    if mode is not None and options is not None:
        raise ValueError(
            "functx.jit: give mode= or options=, not both. A mode is a set of options."
        )
    modes = compiler.modes()
    if mode is not None and mode not in modes:
        raise ValueError(f"functx.jit: mode is {mode!r}, expected one of {(*modes,)}.")
    given = {**(modes[mode] if mode is not None else options or {})}
    given = {name.replace("-", "_"): value for name, value in given.items()}
    if unknown := [name for name in given if not compiler.is_option(name)]:
        raise ValueError(
            f"functx.jit: inductor has no option {unknown[0]!r}; "
            "torch._inductor.list_options() lists them."
        )
    if given.pop("triton.cudagraphs", False):
        raise ValueError(
            "functx.jit: CUDA graphs are not supported, but "
            f"{f'mode={mode!r}' if mode else 'triton.cudagraphs'} asks for them. Use "
            'mode="max-autotune-no-cudagraphs", or put torch.cuda.make_graphed_callables around '
            "the jitted function."
        )
    for name, value in INDUCTOR.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"functx.jit: the option {name} must be {value}. With another value the graph "
                "would lose its recompute, its memory layout or its random numbers."
            )
    return Inductor(tuple(sorted({**given, **INDUCTOR}.items())))


def compiled(
    traced: Traced, backend: Any, name: str, is_plain: bool = False
) -> Callable[[list[Any]], list[Any]]:
    """A function that runs the graph on a list of tensors and sizes, and returns its results.

    It empties the list, so that inputs can be freed early. ``name`` is the function's, for
    messages. A plain graph neither writes to an input nor returns one, so its inputs need not be
    detached.
    """
    is_inductor = backend == "inductor" or isinstance(backend, Inductor)
    n_kept = traced.keep_draws() if isinstance(backend, (str, Inductor)) else 0
    module, examples = traced.module(), traced.examples()
    _note_stages(module.graph)
    notice = noticed(f"functx.jit: {name}", module.graph)
    # The graph has the casts of autocast already. Compiling under autocast would add more.
    outside = _torch.without_dispatch_modes(), _torch.cleared_interpreter_stack()
    with notice, outside[0], outside[1], torch.no_grad(), _torch.without_autocast():
        if is_inductor:
            options = dict(backend.options) if isinstance(backend, Inductor) else INDUCTOR
            boxed = compiler.inductor(module, examples, options)
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
        if is_inductor and any(isinstance(mode, LiveStorages) for mode in modes):
            raise TypeError(
                "functx.jit: functx can't look into a graph that inductor has compiled. For "
                "functx.memory, pass the jitted function as an argument of the measured function. "
                'For functx.saved_residuals use backend="aot_eager", which saves the same tensors.'
            )
        if not is_plain:
            args[:] = [t.detach() if isinstance(t, Tensor) else t for t in args]
        with torch.no_grad(), _torch.without_autocast():
            return ended([*boxed(args)])

    return call


@contextmanager
def noticed(what: str, graph: fx.Graph) -> Iterator[None]:
    """Show the progress of a slow step on a terminal: its name, the size of the graph, the time.

    One line stays when the step is done. If stderr is not a terminal, nothing is written.
    """
    stream = sys.stderr
    if not stream.isatty():
        yield
        return
    start, done = time.monotonic(), threading.Event()

    def line() -> str:
        seconds = time.monotonic() - start
        return f"{what}, {len(graph.nodes):,} operations, {seconds:.0f} s"

    def show() -> None:
        wait = _QUICK
        while not done.wait(wait):
            stream.write(f"\r{line()} ...")
            stream.flush()
            wait = 1.0

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if time.monotonic() - start >= _QUICK:
            stream.write(f"\r{line()}    \n")  # over the dots
            stream.flush()


_QUICK = 2.0  # seconds; shorter steps show nothing


def _boxed(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    def boxed(args: list[Any]) -> Any:
        given = args[:]
        args.clear()
        return run(*given)

    return boxed


def _note_stages(graph: fx.Graph) -> None:
    """Note the stage of each node for inductor; see NOTE [stages]."""

    def stage(node: fx.Node) -> tuple[Any, Any]:
        custom = node.meta.get("custom", {})
        return custom.get("functx_region"), custom.get("functx_phase")

    for number, ((_, phase), nodes) in enumerate(itertools.groupby([*graph.nodes], stage)):
        for node in nodes if phase else ():
            node.meta["custom"] |= {compiler.STAGE: (number, phase == "forward")}
