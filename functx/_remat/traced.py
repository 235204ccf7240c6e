"""Regions in a traced graph, each kept as one call node.

Torch's tracer traces the operations of a region, and those of its replays, into the graph around
it. But code that lowers or differentiates a graph must know the limits of regions. Under
`keep_regions` each call of a region, and each pullback of one, becomes one node:

- it calls `remat_region` with a graph of the region as a submodule, and all its inputs at the base
  level, those that it captures and constants among them; its result is a tuple;
- ``node.meta["functx_region"]`` is a `RegionInfo`;
- run again, in a trace or in torch, it is a region again.

The region runs twice. The first run is not traced, and finds the tensors that the region captures.
Then its replay from these inputs is traced. The results of the replay at the base level take the
place of the first run's results, and get the nodes of autograd and the levels above.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import has_preserved_node_meta

from functx import _torch
from functx._remat import captures, departures, forward, levels, writes
from functx._remat.ledger import Rerun
from functx._remat.listener import listening
from functx._remat.observers import observers, within
from functx._remat.region import Options
from functx._remat.replay import replay
from functx._remat.saving import asks_of_operations

_batch = threading.local()


def keep_regions() -> AbstractContextManager[None]:
    """Leave each region in the graphs that are traced on this thread as one call node."""
    return within(observers.tracers, _run)


def batch_being_traced() -> int:
    """The number of examples that an operation stands for; 1 if no policy asks about one."""
    return getattr(_batch, "size", 1)


@dataclass(frozen=True)
class RegionInfo:
    """The description of a region on its node in a graph."""

    name: str  # of the function
    policy: Any  # what to save; ``None`` for nothing
    replay: bool  # a pullback: a compiler must not merge its recompute with the forward
    per_example: bool  # its operations are batched, and the policy is asked about one example


def remat_region(module: torch.fx.GraphModule, *operands: Tensor) -> tuple[Tensor, ...]:
    """Run the graph of a region; the node of the region calls this."""
    body = torch.fx.Interpreter(module).run if has_preserved_node_meta() else module
    if not torch.is_grad_enabled() and not observers.tracers:
        return tuple(body(*operands))

    def again(*ts: Tensor) -> list[Tensor]:
        return list(body(*ts))

    options = Options(name="a region")
    return tuple(forward.run(again, again, [*operands], options, "a region of a graph"))


def _run(*args: Any) -> list[Tensor]:
    """`forward.run`; as a node of its graph in a trace."""
    if _torch.infra_mode(_torch.PROXY) is None:
        return partial(forward.run, forward=forward.Forward)(*args)
    mode = _torch.unset_mode(_torch.PROXY)
    try:
        return partial(forward.run, forward=partial(_Forward, mode))(*args)
    finally:
        _torch.push_dispatch_mode(mode)


@contextmanager
def unseen() -> Iterator[None]:
    """Let the region whose code is running ignore the calls in this context, as of a tracer."""
    listener = listening()
    if listener is None:
        yield
        return
    listener.sleep()
    for ledger in listener.ledgers:
        if isinstance(ledger, Rerun):
            ledger.i = ledger.end  # the rest of this call does not match the forward
    try:
        yield
    finally:
        listener.wake()


class _Forward(forward.Forward):
    """A run of a region outside of the trace in which it becomes a node."""

    traces = True

    def __init__(self, mode: Any, *args: Any) -> None:
        super().__init__(*args)
        self.mode = mode

    def captures_of(self, *args: Any) -> captures.Captures:
        return _Captures(self.mode, *args)

    def writes_of(self, *args: Any) -> writes.Writes:
        return _Writes(self.mode, *args)

    def lift(self, *args: Any) -> list[Tensor]:
        return _traced(self.mode, super().lift, *args)

    def begin_up(self, fresh: list[Tensor]) -> None:
        """Make the node. From now on, its results are the results at the base level."""
        region, inputs, tracer = self.region, self.inputs, self.mode.tracer
        operands = inputs.values[0]
        given = [self.writes.given[i] for i in region.written_outside()]
        new = [torch.empty_like(t) for t in given]

        def explicit(*values: Tensor) -> tuple[Tensor, ...]:
            return tuple(replay(region, 0, [*values], (), None)[0])

        sizes = [f.size for f in region.frames if f.kind is levels.VMAP]
        policy = region.options.policy
        per_example = bool(sizes) and asks_of_operations(policy)
        before, _batch.size = batch_being_traced(), math.prod(sizes) if per_example else 1
        try:
            trace = partial(_torch.trace_subgraph, explicit, *operands)
            module = _traced(self.mode, levels.at_depth, 0, trace)
        finally:
            _batch.size = before
        tracer.root.register_module(tracer.get_fresh_qualname("region_"), module)
        arguments = (module, *map(tracer.unwrap_proxy, operands))
        proxy = tracer.create_proxy("call_function", remat_region, arguments, {})
        info = RegionInfo(region.options.name, policy, region.options.is_pullback, per_example)
        proxy.node.meta["functx_region"] = info
        _torch.track_proxies((*fresh, *new), proxy, tracer)
        for t, value in zip(given, new):
            _traced(self.mode, levels.at_depth, 0, partial(t.copy_, value))


def _traced(mode: Any, f: Callable[..., Any], *args: Any) -> Any:
    """Call ``f`` so that its result is a part of the graph."""
    with mode:
        return f(*args)


class _Captures(captures.Captures):
    """A listener whose inputs are part of the enclosing graph."""

    def __init__(self, mode: Any, *args: Any) -> None:
        super().__init__(*args)
        self.mode = mode

    def admit(self, t: Tensor) -> int:
        return _traced(self.mode, super().admit, t)

    def _is_inside(self, t: Tensor) -> bool:
        base = levels.base_of(t)
        if isinstance(base, _torch.FakeTensor) and self.mode.tracer.unwrap_proxy(base) is base:
            return True  # tensors from outside are values of the graph, or constants
        return super()._is_inside(t)

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        return _traced(self.mode, super().keep, make)


class _Writes(writes.Writes):
    """Writes to inputs. The copies of their earlier values are part of the enclosing graph."""

    def __init__(self, mode: Any, *args: Any) -> None:
        super().__init__(*args)
        self.mode = mode
        self.given: dict[int, Tensor] = {}  # inputs that are written, at the base level

    def copy(self, inputs: list[int]) -> None:
        if len(inputs) > 1:
            raise departures.refused(
                f"{self.title} is traced, and writes to memory that {len(inputs)} of its arguments "
                "and captured tensors share. Pass copies, x.clone(), to it."
            )

    def value_before(self, i: int, storage: int) -> Tensor:
        given = self.given[i] = self.inputs.values[0][self.inputs.position(i, 0)]
        return _traced(self.mode, levels.at_depth, 0, given.clone)
