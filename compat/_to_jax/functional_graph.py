"""From a torch function and the shapes of its inputs to a functional ATen graph.

Invariant: the graph's placeholders are the inputs, then every tensor that the function closed over
or made from data (``captures``); no tensor is baked in.  Nothing in the graph writes to memory.
Inputs are traced as fake tensors, without data: were a traced value ever taken for a constant, the
constant would be fake and is refused, so it can't be silently wrong.

Passes: (1) run the function under the tracer with operations decomposed to those with rules,
regions and custom Functions kept as nodes; (2) lift constants to placeholders; (3) while any node's
schema is mutable, functionalize the graph and trace again; (4) hand what policies keep to replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule
from torch.fx.traceback import preserve_node_meta

from functx._compile import leaving_nothing, refuse_second_trace
from functx._core import LoweringError, TracingError
from functx._remat import keep_regions, on_name, sharding
from functx._torch import graphs
from functx._torch.lowering import FakeTensorMode, make_fx
from functx._torch.process_patches import applying
from functx.compat._to_jax.nodes import placeholders
from functx.compat._to_jax.passes.functional import (
    drop_writes_to_inputs,
    functional,
    lift_constants,
    own_memory,
)
from functx.compat._to_jax.passes.hand_over import hand_over
from functx.compat._to_jax.rules.table import decompositions
from functx.compat._to_jax.source_lines import at_line
from functx.compat._to_jax.trace.functions import Interceptor, isolate
from functx.compat._to_jax.trace.known_values import KnownValues, Reads
from functx.compat._to_jax.trace.tape import WITHOUT_TAPE, Asked, Observer, Tape, UserCalls
from functx.compat._to_jax.trace.traced_draws import TracedDraws, only_torch_draws
from functx.compat._to_jax.trace.value_checks import heed

_NO_DATA = "data is not allocated yet"
# What torch says of what a trace can't do, and what to do instead.
_REASONS = {
    _NO_DATA: "an operation reads the values of a tensor{at} (numpy(), indices or sizes given as a"
    " tensor, for example) while the function is traced: compute with the tensor, or pass them as"
    " Python numbers",
    "dynamo-optimized function": "{name} calls what torch.compile made{at}, which a trace can't"
    " look into: call the function or module itself, JAX compiles it",
    "Couldn't swap": "{name} converts its own parameters{at} (module.to(dtype), say), which are"
    " arguments in JAX: convert the module before, and leave that out of the call",
}


@dataclass(frozen=True)
class Spec:
    """Shape, dtype and device of one tensor input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"


@dataclass(frozen=True)
class FunctionalGraph:
    """A torch function as a functional ATen graph."""

    module: GraphModule  # placeholders are the inputs, then the captures
    inputs: tuple[Spec, ...]
    captures: tuple[torch.Tensor, ...]  # met while tracing, in the order of their placeholders
    reads: Reads = field(default_factory=dict)  # closed over and read while tracing: values then


def trace(
    f: Callable[..., Sequence[torch.Tensor]], specs: Sequence[Spec], name: str = "the function"
) -> FunctionalGraph:
    """Trace ``f``, which takes flat tensors and returns a flat sequence of tensors.

    Raises:
        LoweringError: for data-dependent operations, writes to captures, random numbers that are
            not torch's, and traced values that the tracer lost.
    """
    mode, known = FakeTensorMode(), KnownValues()
    try:
        module, used = _run(f, specs, name, mode, known, tape=False)
    except (Asked, RuntimeError) as err:
        if not isinstance(err, Asked) and not any(words in str(err) for words in WITHOUT_TAPE):
            raise
        refuse_second_trace(err, name, "it asks for a tape (functx.grad would not)", LoweringError)
        module, used = _run(f, specs, name, mode, known, tape=True)
    _assert_nothing_lost(module, used)
    isolate(module)
    captures = lift_constants(module, mode)
    heed(module)
    own_memory(module)
    module.graph.eliminate_dead_code()  # of values that were known
    module = functional(module, _traced, mode)
    drop_writes_to_inputs(module, len(specs))
    module.graph.eliminate_dead_code()
    hand_over(module)
    module.recompile()
    return FunctionalGraph(module, tuple(specs), tuple(captures), known.reads)


def _traced(run: Callable[..., object], tensors: Sequence[torch.Tensor]) -> GraphModule:
    return make_fx(run, decomposition_table=decompositions())(*tensors)


def _run(
    f: Callable[..., Sequence[torch.Tensor]],
    specs: Sequence[Spec],
    name: str,
    mode: FakeTensorMode,
    known: KnownValues,
    *,
    tape: bool,
) -> tuple[GraphModule, list[bool]]:
    """Pass (1), and which inputs the function used; ``NOTE [asked]`` in ``tape.py``."""
    mode.allow_non_fake_inputs = True
    random_draws, kept = TracedDraws(), Tape(tape)
    observer = Observer(random_draws, kept, known)
    with mode:
        inputs = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in specs]
    used = [False] * len(inputs)

    def observed(*tensors: torch.Tensor) -> list[torch.Tensor]:
        calls, hook = UserCalls(kept, known), Interceptor(random_draws, mode)
        kept.begin(tensors)
        named, drawn = on_name(graphs.note_name), only_torch_draws(name)
        watch = sharding.watching(f"to_jax({name})", LoweringError)
        with watch, leaving_nothing((f,)), calls, observer, applying(hook), named, drawn:
            out = list(f(*tensors))
        for i, t in enumerate(tensors):
            used[i] = id(t) in observer.seen or any(o is t for o in out)
        return out

    try:
        with mode, keep_regions(), preserve_node_meta():
            return _traced(observed, inputs), used
    except TypeError as err:
        if "FakeTensor" in str(err) and "abstract array" in str(err):
            raise TypeError(
                f"to_jax takes torch functions, and {name} calls JAX{at_line(err)} on a tensor"
            ) from err
        raise
    except RuntimeError as err:
        if isinstance(err, TracingError):
            raise LoweringError(str(err).removeprefix("functx.jit: ")) from err
        said = _NO_DATA if graphs.reads_values(err) else str(err)
        for words, why in _REASONS.items():
            if words in said:
                raise LoweringError(why.format(name=name, at=at_line(err))) from err
        raise
    finally:
        mode.allow_non_fake_inputs = False  # what outlives this computes nothing with real tensors
        random_draws.restore()


def _assert_nothing_lost(module: GraphModule, used: Sequence[bool]) -> None:
    # Before dead code goes: until then every operation that took an input is a user of it.
    lost = [i for i, p in enumerate(placeholders(module)) if used[i] and not p.users]
    if lost:
        raise LoweringError(
            f"the function uses its inputs {lost} (in flattened order), but the graph lost them: a"
            " transform inside took them for constants. Pass them to what it transforms"
        )
