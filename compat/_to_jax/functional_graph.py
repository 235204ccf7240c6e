"""Trace a torch function, for inputs of some shapes, into a functional ATen graph.

Invariant: the placeholders of the graph are the inputs, followed by every tensor that the function
closes over or makes from data (``captures``). No tensor is a constant of the graph, and nothing in
it writes to memory. Inputs are traced as fake tensors, without data. If a traced value were taken
for a constant by mistake, that constant would be fake, and an error is raised for it.

Passes:

1. Run the function under the tracer. Operations without a rule are decomposed; regions and custom
   Functions become one node each.
2. Turn constants into placeholders.
3. As long as a node writes, functionalize the graph and trace it again.
4. Pass the values that policies save from regions to their replays.

What could be improved: a function that asks whether tensors require grad is traced twice, and a
graph with writes is traced once more.
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
# Words in torch's errors during a trace, with the message that replaces them.
_REASONS = {
    _NO_DATA: "an operation reads the values of a tensor{at} while the function is traced (for"
    " example numpy(), or indices or sizes in a tensor). Compute with the tensor, or pass the"
    " values as Python numbers",
    "dynamo-optimized function": "{name} calls code that torch.compile has compiled{at}, which"
    " can't be traced. Call the original function or module; JAX compiles it",
    "Couldn't swap": "{name} converts its own parameters{at} (for example by module.to(dtype)), but"
    " parameters are arguments in JAX. Convert the module before the call, not inside it",
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
    captures: tuple[torch.Tensor, ...]  # captured tensors, in the order of their placeholders
    # Captured tensors whose values Python code has read while tracing, with these values.
    reads: Reads = field(default_factory=dict)


def trace(
    f: Callable[..., Sequence[torch.Tensor]], specs: Sequence[Spec], name: str = "the function"
) -> FunctionalGraph:
    """Trace ``f``, which takes flat tensors and returns a flat sequence of tensors.

    Raises:
        LoweringError: for data-dependent operations, writes to captures, random numbers of other
            libraries than torch, and traced values that the tracer lost track of.
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
    module.graph.eliminate_dead_code()  # nodes whose values were known while tracing
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
    """Pass 1. Returns the graph, and which inputs the function used.

    ``tape`` says whether inputs require grad while tracing; ``NOTE [asked]`` in ``tape.py``.
    """
    mode.allow_non_fake_inputs = True
    random_draws, the_tape = TracedDraws(), Tape(tape)
    observer = Observer(random_draws, the_tape, known)
    with mode:
        inputs = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in specs]
    used = [False] * len(inputs)

    def observed(*tensors: torch.Tensor) -> list[torch.Tensor]:
        calls, hook = UserCalls(the_tape, known), Interceptor(random_draws, mode)
        the_tape.begin(tensors)
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
                f"to_jax takes torch functions, but {name} calls JAX{at_line(err)} on a tensor."
                " Wrap the JAX function by functx.compat.from_jax"
            ) from err
        raise
    except RuntimeError as err:
        if isinstance(err, TracingError):
            raise LoweringError(str(err).removeprefix("functx.jit: ")) from err
        text = _NO_DATA if graphs.reads_values(err) else str(err)
        for words, why in _REASONS.items():
            if words in text:
                raise LoweringError(why.format(name=name, at=at_line(err))) from err
        raise
    finally:
        # A fake tensor that outlives the trace can't be combined with real ones.
        mode.allow_non_fake_inputs = False
        random_draws.restore()


def _assert_nothing_lost(module: GraphModule, used: Sequence[bool]) -> None:
    # This runs before dead code is removed: every operation that read an input still uses it.
    lost = [i for i, p in enumerate(placeholders(module)) if used[i] and not p.users]
    if lost:
        raise LoweringError(
            f"the function uses its inputs {lost} (in flattened order), but the graph lost them,"
            " because a transform inside took them for constants. Pass them as arguments to the"
            " function that is transformed"
        )
