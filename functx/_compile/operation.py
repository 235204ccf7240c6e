"""A jitted function as one operation: how its graphs run, and its pullback (J6).

An ordinary pullback, at the base level, is the second half of a graph whose first half has run
(`tracing.cut`). It reads the values that regions keep. A pullback that is itself differentiated is
another program, traced from the function itself, so that derivatives of any order compose. Inside
vmap and forward mode the function runs in eager; with `functx.jit` around them, all is one graph.

Only the values that the second half reads are saved for the backward, with autograd's version
check. The operation holds other inputs by plain reference, without that check. They are needed only
if the pullback is differentiated. That computes from the inputs, and refuses inputs that were
written since.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._compile.program import (
    MAKING,
    Flat,
    Inputs,
    Outcome,
    Program,
    Run,
    added,
    met_themselves,
    without_hooks,
)
from functx._compile.surroundings import alike, base_of, described
from functx._core import TracingError, tell, uncompiled
from functx._remat import is_tracked, read_outside
from functx._torch import dual_level, is_legacy_batched, level_of
from functx._transforms import derivatives

Tensors = Sequence[Tensor]
IN_EAGER = "it runs in eager inside vmap and jvp. Put functx.jit around the transforms"


def is_mapped() -> bool:
    """Whether a call is inside of vmap or of forward mode."""
    levels = _torch.interpreter_stack() or ()
    return dual_level() >= 0 or any(i.key() != _torch.TransformType.Grad for i in levels)


@dataclass
class Call:
    """One call, with everything needed to trace its function now or for a later derivative."""

    flat: Any  # a `Flat`
    backend: Any
    dynamic: bool
    name: str
    captured: Tensors = ()  # the tensors of the state, in the order of slots
    real: Mapping[int, Tensor] = field(default_factory=dict)  # captured tensors by input number
    check: Callable[[], None] = lambda: None  # raises if the state has changed since the call
    watch: Callable[[], Any] = contextlib.nullcontext  # a context for a trace that undoes effects


def run(
    program: Program, call: Callable[[], Call], inputs: Tensors, originals: Tensors | None = None
) -> list[Tensor]:
    """Run a program as an operation that can be differentiated.

    ``call`` returns the `Call`, which a derivative of the pullback needs. ``originals`` are the
    inputs before conj and neg bits were resolved, or ``None`` if no input has such bits.
    """
    if _torch.dispatch_depth():
        read_outside(inputs)
    is_at_base = _torch.peek_interpreter() is None
    if not program.differentiated and (is_at_base or not any(level_of(t) > 0 for t in inputs)):
        outputs = program.run(program.given(inputs), inputs)
        return program.finished(outputs, inputs, originals)
    known = _Known(program, call, inputs)
    if program.without:
        given: Tensors = [t.detach() if i in program.without else t for i, t in enumerate(inputs)]
    else:
        given = inputs
    if is_at_base and torch.is_grad_enabled():
        outputs = _AtBase.apply(known, *given)
    else:
        with torch.set_grad_enabled(torch.is_grad_enabled() or program.records):
            outputs = _AtLevels.apply(known, *given)
    return program.finished(outputs[: len(program.tracked)], inputs, originals)


@dataclass
class _Known:
    """The data of one operation in addition to its tensors."""

    program: Program
    call: Callable[[], Call]
    inputs: Tensors
    sizes: Sequence[int] = ()  # saved sizes, which the backward reads
    versions: Sequence[int] = ()  # versions of the inputs right after the forward


def _forward(known: _Known, given: list[Any], inputs: Tensors) -> tuple[Tensor, ...]:
    """The outputs, and then the values that the base level saves for the backward."""
    program = known.program
    outputs = program.run(given, inputs)
    if any(t is None for t in outputs):
        raise TracingError(
            "functx.jit: a kernel returned no workspace for its backward, because it ran without "
            "autograd (oneDNN's LSTM on a CPU does so). Call the jitted function under "
            "torch.backends.mkldnn.flags(enabled=False), or take the gradient inside: "
            "functx.jit(functx.grad(...))."
        )
    if program.differentiated and program.n_sizes:
        n = len(outputs) - program.n_sizes
        known.sizes = outputs[n:]
        outputs = outputs[:n]
    n = len(program.tracked)
    # Autograd would give a saved view of a result the history of that result.
    saved = (t.detach() if t._is_view() else t for t in outputs[n:])
    return _apart([*outputs[:n], *saved])


def _set_up(ctx: Any, known: _Known, inputs: Tensors, outputs: Tensors, read: Any) -> None:
    """Save tensors for the backward. ``read`` are the inputs that it reads at the base level."""
    program, ctx.known = known.program, known
    n = len(program.tracked)
    results, saved = outputs[:n], outputs[n:]
    constant = [t for t, tracked in zip(results, program.tracked) if not tracked]
    ctx.mark_non_differentiable(*constant, *saved)
    ctx.set_materialize_grads(False)
    ctx.like = [
        (t.shape, t.dtype, t.device) if tracked else None
        for t, tracked in zip(results, program.tracked)
    ]
    if read is not None:
        ctx.save_for_backward(*read, *saved)
        ctx.n_read = len(read)
        known.versions = _versions(inputs)
    else:
        ctx.save_for_backward(*inputs, *saved)
        ctx.n_read = None


def _backward(ctx: Any, cotangents: Sequence[Any]) -> Any:
    known, program = ctx.known, ctx.known.program
    cotangents = cotangents[: len(program.tracked)]
    if any(t is not None and is_legacy_batched(t) for t in cotangents):
        raise TracingError(
            "functx.jit: is_grads_batched=True has no rule. Use functx.vmap of the pullback."
        )
    stored = ctx.saved_tensors  # read only once, since each read runs the saved-tensor hooks
    if ctx.n_read is None:
        n = len(known.inputs)
        inputs, saved = stored[:n], stored[n:]
        read = None
    else:
        inputs, read, saved = known.inputs, stored[: ctx.n_read], stored[ctx.n_read :]
    del stored
    filled = [
        None if like is None else _filled(cotangent, *like)
        for cotangent, like in zip(cotangents, ctx.like)
    ]
    roots = [t for t in filled if t is not None]
    given = [c for c, like in zip(cotangents, ctx.like) if like is not None]
    present = sum(1 << k for k, c in enumerate(given) if c is not None)
    everything = [*inputs, *roots]
    recorded = torch.is_grad_enabled() and any(map(is_tracked, everything))
    if recorded or any(level_of(t) > 0 for t in everything):
        needs = ctx.needs_input_grad[1:]
        if ctx.n_read is not None:
            _check_versions(known)
            inputs = _as_read(program, inputs, read)
        needs = [n and bool(program.depends.get(i, 0) & present) for i, n in enumerate(needs)]
        return None, *_differentiated(known, inputs, roots, needs)
    if read is None:
        all_given = program.given(inputs)
        read = [all_given[i] for i in program.reads]
        del all_given
    args = [*read, *saved, *known.sizes, *(t.contiguous() for t in roots)]
    n_inputs = len(inputs)
    ctx.maybe_clear_saved_tensors()  # unless the graph is retained
    del inputs, read, saved, everything, filled, roots, cotangents, given
    return None, *program.pull_back(args, n_inputs, present)


def _as_read(program: Program, inputs: Tensors, read: Any) -> list[Tensor]:
    """The inputs, with saved ones as unpacked: saved-tensor hooks may have moved them."""
    saved = dict(zip(program.reads, read))
    n = program.n
    places = {i: i for i in range(n)}
    places |= {n + k: s for k, s in enumerate(program.sources) if isinstance(s, int)}
    found = [*inputs]
    for i, t in saved.items():
        if i in places:
            found[places[i]] = t
    return found


def _filled(cotangent: Any, shape: Any, dtype: Any, device: Any) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if cotangent is None else cotangent


_version: Any = operator.attrgetter("_version")


def _versions(tensors: Tensors) -> list[int]:
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # tensors of inference mode have no version
        return [0 if t.is_inference() else t._version for t in tensors]


def _check_versions(known: _Known) -> None:
    written = known.program.written or known.program.copied_back
    if written or _versions(known.inputs) != known.versions:
        raise TracingError(
            "functx.jit: differentiating the pullback computes the function again, but the "
            "function, or code after it, has written to one of its inputs in place. Clone that "
            "input first, or put functx.jit around the whole derivative."
        )


class _AtBase(_torch.SingleLevelFunction):
    """The operation when no transform is active: one autograd node."""

    @staticmethod
    def forward(ctx: Any, known: _Known, *inputs: Tensor) -> Any:
        program = known.program
        given = program.given(inputs)
        for i, *_ in program.reshaped:  # the call will reshape the input, but not the saved alias
            given[i] = inputs[i].data
        read = [given[i] for i in program.reads]
        if program.copied_back:  # the backward reads only their sizes, so writes do no harm
            written = {id(inputs[i]) for i in program.copied_back}
            read = [t.data if id(t) in written else t for t in read]
        outputs = _forward(known, given, inputs)
        _set_up(ctx, known, inputs, outputs, read)
        return outputs

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return _backward(ctx, cotangents)


class _AtLevels(torch.autograd.Function):
    """The operation inside transforms: an autograd node at each level."""

    @staticmethod
    def forward(known: _Known, *inputs: Tensor) -> Any:
        return _forward(known, known.program.given(inputs), inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        known, *tensors = inputs
        _set_up(ctx, known, tensors, output, None)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return _backward(ctx, cotangents)


def _apart(tensors: Tensors) -> tuple[Tensor, ...]:
    """Detach repeated tensors: autograd would treat the same tensor returned twice as one output.

    A tensor may also be both a result and a saved value, as for ``exp``.
    """
    if len({*map(id, tensors)}) == len(tensors):
        return (*tensors,)
    ids = [id(t) for t in tensors]
    return tuple(t.detach() if id(t) in ids[:i] else t for i, t in enumerate(tensors))


# -- pullbacks that are differentiated in turn


def _differentiated(known: _Known, inputs: Tensors, roots: Tensors, needs: Any) -> list[Any]:
    """The gradients of the inputs, by a program made from the pullback itself."""
    program, call = known.program, known.call()
    if program.draws:
        raise TracingError(
            "functx.jit: the function draws random numbers. Differentiating or mapping its "
            "pullback computes the function again, which would draw other numbers. Put functx.jit "
            "around the transform, or draw from keys (functx.compat.random)."
        )
    call.check()
    first = alike(inputs)
    wanted = tuple(need and first[i] == i for i, need in enumerate(needs))
    given = [*inputs, *roots]
    flat = _pullback(program, call, first, wanted)
    if is_mapped():
        tell("a jitted function", IN_EAGER)
        found = iter(flat(given, given.__getitem__).results)
        return [next(found) if want else None for want in wanted]
    pulled = replace(call, flat=flat, captured=())
    ours = program_for(program.pullbacks, wanted, pulled, given, len(inputs))
    found = iter(run(ours, lambda: pulled, given))
    return [next(found) if want else None for want in wanted]


def program_for(
    known: dict[Any, list[Program]], wanted: Any, call: Call, given: Tensors, n: int
) -> Program:
    """A known or new program whose inputs are all arguments.

    The first ``n`` are inputs of the forward, whose program has checked their kinds already.
    """
    records = torch.is_grad_enabled()
    tracked = tuple(map(is_tracked, given))
    bases = [base_of(t) for t in given]
    kinds = tuple([described(t, not call.dynamic) for t in bases[n:]])
    if call.dynamic:
        kinds += tuple([t.shape for t in bases[:n]])
    programs = known.setdefault((wanted, records, tracked, kinds), [])
    with MAKING:
        program = next((p for p in programs if p.fits(bases, ())), None)
        if program is None:
            leaves = [t.is_leaf for t in given]
            inputs = Inputs(bases, tracked, leaves, alike(given), real=call.real)
            with call.watch():
                program = Program(call.flat, inputs, call.dynamic, records)
            program.compile(call.backend, f"{call.name}, pullback")
            programs.append(program)
    return program


def _pullback(program: Program, call: Call, first: Sequence[int], wanted: Sequence[bool]) -> Flat:
    """A function from inputs and cotangents of tracked outputs to gradients of wanted inputs."""
    m = len(wanted)
    places = [i for i, want in enumerate(wanted) if want]

    def flat(tensors: Tensors, _: Any) -> Outcome:
        given, cotangents = [*tensors[:m]], tensors[m:]

        def outputs(*some: Tensor) -> tuple[Tensor, ...]:
            args = [*given]
            for i, t in zip(places, some):
                args[i] = t
            args = [args[i] for i in first]
            inner = _Again(program, call, args)
            found = inner.outputs(args[: program.n], program.dynamic)
            return tuple(t for t, tracked in zip(found, program.tracked) if tracked)

        if not program.unseen:
            pull = derivatives.vjp(outputs, *[given[i] for i in places])[1]
            return Outcome(pull(tuple(cotangents)))
        recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = [_leaf(given[i]) for i in places]
            outs = outputs(*leaves)
        numbers = met_themselves([t for t in outs if t.requires_grad], call.real)
        real = [call.real[i] for i in numbers]
        pairs = [(t, c) for t, c in zip(outs, cotangents) if t.requires_grad]
        found: dict[int, Tensor] = {}
        if pairs:
            roots, of_roots = zip(*pairs)
            with without_hooks(real):
                gradients = torch.autograd.grad(
                    roots, [*leaves, *real], of_roots, create_graph=recorded, allow_unused=True
                )
            found = added(zip([*places, *numbers], gradients))
        zeros = (torch.zeros_like(t) for t in leaves)
        return Outcome([found.get(i, zero) for i, zero in zip(places, zeros)])

    return flat


class _Again(Run):
    """Runs the function again for a derivative, on inputs with the tapes that they already have."""

    def __init__(self, program: Program, call: Call, given: Tensors) -> None:
        n = program.n
        inputs = Inputs(
            given[:n], [False] * n, [True] * n, range(n), call.captured, same=program.same
        )
        super().__init__(call.flat, inputs, program.copied, True)
        self._values, self._program = given[n:], program

    def finished(self, outcome: Outcome, dynamic: bool) -> list[Any]:
        numbers, program = getattr(outcome.met, "numbers", {}), self._program
        results = [self.standin(numbers[id(t)]) if id(t) in numbers else t for t in outcome.results]
        finals = (self.begun[i] for i in program.copied_back)
        return [*program.sharing.again(results), *finals]

    def begin(self, number: int, t: Tensor, tracked: bool, is_leaf: bool) -> Tensor:
        t = t.clone() if number in self._copied else t
        self.begun[number], self._fresh[number] = t, (t.grad_fn, t.requires_grad)
        return t

    def standin(self, k: int) -> Tensor:
        number = self.n + k
        return self.begun[number] if number in self.begun else self.begin(
            number, self._values[k], False, True
        )  # fmt: skip


def _leaf(t: Tensor) -> Tensor:
    return t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
