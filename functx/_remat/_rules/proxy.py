"""Regions in a traced graph: inlined by default, or kept as call nodes for the JAX lowering."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import has_preserved_node_meta

from functx import _torch
from functx._remat._custom import running
from functx._remat._operator import call
from functx._remat._options import Options
from functx._remat._region import Flat, Region
from functx._remat._rules.base import Frame
from functx._remat._saving import asks_per_example


class _Batch(threading.local):
    size = 1


_batch = _Batch()


@contextmanager
def keep_regions() -> Iterator[None]:
    """While a graph is traced on this thread, leave each region in it as one call node.

    The node's target is :data:`remat_region`, its arguments are a submodule and the region's
    inputs (captures and constants among them), its result a tuple;
    ``node.meta["functx_region"]`` is a `RegionInfo`.
    """
    running.keeping += 1
    try:
        yield
    finally:
        running.keeping -= 1


def keeping() -> bool:
    """Whether regions are to be kept in a graph."""
    return running.keeping > 0


def batch_being_traced() -> int:
    """How many examples an operation of the region that is being traced stands for.

    1 unless the region has a policy which is to be asked about one of them.
    """
    return _batch.size


@dataclass(frozen=True)
class RegionInfo:
    """What a kept region is.

    Attributes:
        name: of the function.
        policy: what to save, ``None`` for nothing.
        replay: whether it is the pullback of a region: its forward part is a recompute that a
            compiler must not merge with the forward.
        per_example: whether its operations are batched, and the policy is to be asked about one
            example.
    """

    name: str
    policy: Any
    replay: bool
    per_example: bool = False


def remat_region(module: torch.nn.Module, *operands: Tensor) -> tuple[Any, ...]:
    """The target of a kept region: run in torch, it is a region again."""
    run = torch.fx.Interpreter(module).run if has_preserved_node_meta() else module
    return tuple(call(Region(lambda *t: list(run(*t)), list(operands), Options("region"))))


class KeptFrame(Frame):
    """The bottom of the stack while a graph is traced: tensors are as they are."""

    def __init__(self, fn: Flat, region: Region) -> None:
        super().__init__(0, fn, region)

    def lower(self, t: Tensor) -> list[Tensor]:
        """As it is."""
        self.slots.append(None)
        return [t]

    def lift(self, values: Sequence[Tensor], slot: Any, level: int) -> Tensor:
        """As it is, but a tensor of its own."""
        return values[0].detach()

    def __call__(self, *values: Tensor) -> list[Tensor | None]:
        """The function itself."""
        return self.fn(*self.lift_all(values, self.slots, 0))

    def finish(self, outs: list[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """As they are."""
        return outs


def emit(fn: Flat, inputs: Sequence[Tensor], region: Region, first_run: Any) -> Any:
    """Trace the region into a submodule and call it by one node.

    It runs twice: untraced, to find out what it captures, and then with everything explicit.
    """
    frame = KeptFrame(fn, region)
    lowered = frame.lower_all(inputs)
    frame.inputs = inputs
    region.frames.insert(0, frame)
    mode = _torch.proxy_mode()
    if mode is None:
        return first_run(frame, lowered, region)
    with _torch.without_proxies():
        outs = first_run(frame, lowered, region)
    operands = [*inputs, *frame.captured]

    def explicit(*tensors: Tensor) -> tuple[Any, ...]:
        return tuple(fn(*tensors))

    sizes = [f.batch_size for f in region.frames if f.batch_size is not None]
    policy = region.options.policy
    per_example = bool(sizes) and policy is not None and asks_per_example(policy)
    before, _batch.size = _batch.size, math.prod(sizes) if per_example else 1
    try:
        module = _torch.trace_subgraph(explicit, *operands)
    finally:
        _batch.size = before
    tracer = mode.tracer
    name = tracer.get_fresh_qualname("region_")
    tracer.root.register_module(name, module)
    arguments = tuple(tracer.unwrap_proxy(t) for t in operands)
    proxy = tracer.create_proxy("call_function", remat_region, (module, *arguments), {})
    options = region.options
    proxy.node.meta["functx_region"] = RegionInfo(options.name, policy, options.replay, per_example)
    return list(_torch.track_proxies(tuple(outs), proxy, tracer))
