"""A jitted function as one operation: how it runs, and its pullback.

At the base level, where nobody differentiates the pullback, that is the second half of a graph
whose first half has run (`tracing.cut`), and reads what regions keep. Else it is a jitted function
in turn, traced from the function itself, so that any order composes. Within vmap and forward mode
the function runs in eager: put around these, `functx.jit` makes one graph of them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._compile.backends import compiled
from functx._compile.state import refuse_second_trace
from functx._compile.tracing import cut, trace
from functx._core import TracingError, has_derivatives, tell, uncompiled
from functx._remat import is_tracked, read_outside, tape_of
from functx._torch import dual_level, graphs, is_legacy_batched, level_of
from functx._transforms import derivatives

_MAKING = threading.RLock()  # torch traces and compiles in one thread at a time
Tensors = Sequence[Tensor]
# From arguments and state, the tensors among what a function returns, and the rest of it.
Flat = Callable[[Tensors, Tensors], tuple[Sequence[Tensor], Any]]


class Code:
    """A function of tensors, which reads further ones (its state), and its graphs."""

    def __init__(self, flat: Flat, backend: Any, dynamic: bool, held: Any = ()) -> None:
        self.flat, self.backend, self.dynamic, self.held = flat, backend, dynamic, held
        self._needs_numbers = False  # for sizes, though dynamic
        self._programs: dict[Any, list[JittedProgram]] = {}
        self._pullbacks: dict[Any, Code] = {}
        self.draws = False  # random numbers
        self.last: Any = threading.local()  # ``rest``: what was returned last, beside tensors

    def program(self, tensors: Tensors, state: Tensors, mask: tuple[bool, ...]) -> JittedProgram:
        """The graphs for such inputs, of which those in ``mask`` are differentiated."""
        sized = state if self.dynamic else (*tensors, *state)
        kinds = [(t.ndim, t.dtype, t.device) for t in (*tensors, *state)]
        key = (mask, *kinds, tuple([(t.shape, t.stride()) for t in sized]))
        programs = self._programs.setdefault(key, [])
        found = next((p for p in programs if p.holds_for(tensors)), None)
        if found is None:
            with _MAKING:  # or another thread has made it meanwhile
                found = next((p for p in programs if p.holds_for(tensors)), None)
                if found is None:
                    programs.append(found := self._made(tensors, state, mask))
        self.last.rest = found.rest
        return found

    def _made(self, tensors: Tensors, state: Tensors, mask: tuple[bool, ...]) -> JittedProgram:
        """A new program: with sizes as symbols, as long as that works."""
        dynamic = self.dynamic and not self._needs_numbers
        try:
            return JittedProgram(self, tensors, state, mask, dynamic)
        except Exception as error:
            if isinstance(error, TracingError) or not dynamic:
                raise
            refuse_second_trace(error, "functx.jit: the function", "sizes can't be symbols")
            found = JittedProgram(self, tensors, state, mask, False)  # or the function's own error
            self._needs_numbers = True
            why = (str(error) or type(error).__name__).splitlines()[0]
            tell(
                "functx.jit(dynamic=True)",
                "one graph for all sizes is not to be had here, each has its own: torch, or the "
                f"function, needs numbers ({why})",
            )
            return found

    def pullback(self, n: int, mask: tuple[bool, ...]) -> Code:
        """Its pullback, as a function of ``n`` arguments and then a cotangent for each result."""
        if (n, mask) not in self._pullbacks:
            flat = _pullback(self, n, mask)
            self._pullbacks[n, mask] = Code(flat, self.backend, self.dynamic)
        return self._pullbacks[n, mask]


def _pullback(inner: Code, n: int, mask: tuple[bool, ...]) -> Flat:
    """The gradients of the inputs in ``mask``, from inputs and a cotangent for each result."""
    places = [i for i, m in enumerate(mask) if m]

    def flat(tensors: Tensors, state: Tensors) -> tuple[Sequence[Tensor], Any]:
        args, cotangents = [*tensors[:n]], tensors[n:]

        def results(*some: Tensor) -> tuple[Tensor, ...]:
            for i, t in zip(places, some):
                args[i] = t
            return tuple(t for t in inner.flat(args, state)[0] if has_derivatives(t))

        if not any(mask[n:]):
            return derivatives.vjp(results, *[args[i] for i in places])[1](tuple(cotangents)), None
        recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            args = [_leaf(t) if m else t for t, m in zip(args, mask)]
            outs = results()
            of = [t for t, m in zip((*args, *state), mask) if m]
            pairs = [(t, c) for t, c in zip(outs, cotangents) if t.requires_grad]
        found: Any = [None] * len(of)
        if pairs:
            roots, given = zip(*pairs)
            found = torch.autograd.grad(roots, of, given, create_graph=recorded, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(of, found)], None

    return flat


def _leaf(t: Tensor) -> Tensor:
    return t.view_as(t) if t.requires_grad else t.detach().requires_grad_()


class JittedProgram:
    """The graphs of a function for inputs of some shapes: forward, and backward if need be."""

    def __init__(
        self, code: Code, tensors: Tensors, state: Tensors, mask: tuple[bool, ...], dynamic: bool
    ) -> None:
        self.tracked = list[bool]()  # which results depend on inputs in the mask
        self.found = list[bool]()  # which inputs in the mask have a gradient
        self.rest, self.n_sizes = None, 0

        def forward(_: Any, *given: Tensor) -> Sequence[Tensor]:
            results, self.rest = code.flat(given, state)
            self.tracked = [t.requires_grad for t in results]
            return results

        def joint(cotangent_of: Any, *given: Tensor) -> list[Tensor]:
            args = [t.requires_grad_() if m else t for t, m in zip(given, mask)]
            of = [t for t, m in zip((*args, *state), mask) if m]
            with torch.enable_grad():
                results = forward(None, *args)
            roots = [t for t in results if t.requires_grad]
            found: Any = [None] * len(of)
            if roots:
                cotangents = [cotangent_of(t) for t in roots]
                try:
                    found = torch.autograd.grad(roots, of, cotangents, allow_unused=True)
                except RuntimeError as error:
                    if "is not implemented" in str(error):
                        raise TracingError(
                            "functx.jit: results are differentiated once more, with respect to "
                            f"what requires grad, and torch can't ({error}). Detach parameters "
                            "before, or call under torch.no_grad()."
                        ) from error
                    if "through the graph a second time" not in str(error):
                        raise
                    self.tracked = [False] * len(results)  # the function has pulled it back
            self.found = [g is not None for g in found]
            return [t.detach() for t in (*results, *found) if t is not None]

        traced = trace(joint if any(mask) else forward, tensors, dynamic)
        of_state = [t for t, m in zip(state, mask[len(tensors) :]) if m]
        found = self.found[sum(mask[: len(tensors)]) :]
        _check_not_computed([t for t, f in zip(of_state, found) if f], of_state)
        numbers = {id(t): i for i, t in enumerate(state)}
        gradients = {id(t.grad) for t in state if t.is_leaf} - {*numbers}
        if any(id(t) in gradients for t in traced.constants):
            raise TracingError(
                "functx.jit: the function reads .grad of a tensor, as an optimizer's step() does: "
                "another one at each call. Call step() outside, or give gradients as arguments."
            )
        code.draws = code.draws or traced.draws()
        self.written = traced.written()
        if any(mask):
            second, self.reads, self.n_sizes = cut(traced, len(self.tracked))
            self._backward = compiled(second, code.backend)
        self._sources = [numbers.get(id(t), t) for t in traced.constants]
        self._forward = compiled(traced, code.backend)
        self.holds_for: Callable[[Tensors], bool] = lambda tensors: True
        if code.dynamic:
            self.holds_for = graphs.holds_for(traced.examples()[: len(tensors)])

    def given(self, tensors: Tensors, state: Tensors) -> list[Any]:
        """What the forward is given: arguments, and what it reads beside them."""
        return [*tensors, *(state[s] if isinstance(s, int) else s for s in self._sources)]

    def run(self, tensors: Tensors, state: Tensors) -> list[Any]:
        """Results, and what is saved."""
        given = self.given(tensors, state)
        if self.written:
            _check_apart(given, self.written)
        return self._forward(given)

    def pull_back(self, args: list[Any]) -> list[Tensor | None]:
        """The gradients of the inputs in the mask; ``None`` for those that have none.

        ``args`` are inputs, what is saved, and cotangents. They go where they have been read.
        """
        gradients = iter(self._backward(args))
        return [next(gradients) if found else None for found in self.found]


def _check_apart(given: Tensors, written: Sequence[int]) -> None:
    """Refuse inputs that share memory, where one is written: a graph knows each by itself."""
    if len({*map(_torch.storage_of, given)}) == len(given):
        return
    strided = [(i, t) for i, t in enumerate(given) if t.layout is torch.strided]
    places = [(t.data_ptr(), _bytes_spanned(t), i in written) for i, t in strided]
    end, was_written = 0, False
    for start, length, is_written in sorted(places):
        if start < end and length and (is_written or was_written):
            raise TracingError(
                "functx.jit: the function writes to a tensor that it is given, or reads otherwise, "
                "twice: as itself, or in views whose memory overlaps or interleaves. Give it once, "
                "and take views of it in the function."
            )
        end, was_written = max((end, was_written), (start + length, is_written))


def _bytes_spanned(t: Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
    return (last + 1) * t.element_size() if t.numel() else 0


def _check_not_computed(read: Tensors, differentiated: Tensors) -> None:
    """Refuse a tensor that is computed of another one: a trace passes gradients on to that, too."""
    known = {t.grad_fn or id(t) for t in differentiated}
    below = (node for t in read for node in [*tape_of([t], 0)][1:])
    if any(node in known or id(getattr(node, "variable", None)) in known for node in below):
        raise TracingError(
            "functx.jit: the function reads a tensor, and another one that is computed of it "
            "outside, and their gradients would be mixed. Give one of them as an argument."
        )


def call(code: Code, tensors: Tensors, state: Tensors) -> list[Tensor]:
    """Run a function, as an operation that can be differentiated; in eager under vmap and jvp."""
    stack = _torch.interpreter_stack() or ()
    others = any(level.key() != _torch.TransformType.Grad for level in stack)
    if others or dual_level() >= 0 or any(level_of(t) > 0 for t in state):
        tell(
            "a jitted function",
            "it runs in eager inside of vmap and jvp, and where it reads a tensor of a transform "
            "around otherwise than through its arguments. Put functx.jit around the transforms",
        )
        results, code.last.rest = code.flat(tensors, state)
        return [*results]
    given = [*tensors, *state]
    mask = tuple(torch.is_grad_enabled() and is_tracked(t) for t in given)
    read_outside(given)
    if not any(mask) and not any(level_of(t) > 0 for t in tensors):
        return code.program(tensors, state, mask).run(tensors, state)
    known = _Known(code, len(tensors), mask, state)
    found = _Operation.apply(known, *given)
    return [*found[: len(known.program.tracked)]]


@dataclass
class _Known:
    """What an operation knows beside tensors."""

    code: Code
    n: int  # of its inputs, which are arguments; the others are state
    mask: tuple[bool, ...]
    state: Tensors  # as it is at the base level
    program: Any = None  # the `JittedProgram` that has run
    sizes: Sequence[int] = ()  # that its backward reads


class _Operation(torch.autograd.Function):
    """Its outputs are results, and then what the base level has saved for the backward."""

    @staticmethod
    def forward(known: _Known, *given: Tensor) -> Any:
        tensors = given[: known.n]
        program = known.program = known.code.program(tensors, known.state, known.mask)
        results = program.run(tensors, known.state)
        if any(t is None for t in results):
            raise TracingError(
                "functx.jit: a kernel that runs without a tape leaves its backward nothing to read "
                "(oneDNN's LSTM, on a CPU). Call under torch.backends.mkldnn.flags(enabled=False), "
                "or take the gradient inside: functx.jit(functx.grad(...))."
            )
        n = len(results) - program.n_sizes
        known.sizes = results[n:]
        return _apart(results[:n])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        known, *given = inputs
        ctx.known, ctx.n_given = known, len(given)
        tracked = known.program.tracked
        results, saved = output[: len(tracked)], output[len(tracked) :]
        constant = [t for t, d in zip(results, tracked) if not (d and has_derivatives(t))]
        ctx.mark_non_differentiable(*saved, *constant)
        ctx.set_materialize_grads(False)
        like = [(t.shape, t.dtype, t.device) for t in results]
        ctx.results = {i: like[i] for i, t in enumerate(results) if has_derivatives(t)}
        ctx.save_for_backward(*given, *saved)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *cotangents: Any) -> Any:
        known, n = ctx.known, ctx.known.n
        if any(t is not None and is_legacy_batched(t) for t in cotangents):
            raise TracingError(
                "functx.jit: is_grads_batched=True has no rule. Map a pullback by functx.vmap."
            )
        given, saved = ctx.saved_tensors[:n], ctx.saved_tensors[ctx.n_given :]
        all_given = [t for t in (*given, *known.state, *cotangents) if t is not None]
        needs = ctx.needs_input_grad[1:]
        recorded = torch.is_grad_enabled() and any(map(is_tracked, all_given))
        filled = {i: cotangents[i] for i in ctx.results}
        for i, (shape, dtype, device) in ctx.results.items():
            if filled[i] is None:
                filled[i] = torch.zeros(shape, dtype=dtype, device=device)
        program = known.program
        if recorded or any(level_of(t) > 0 for t in all_given):
            if known.code.draws:
                raise TracingError(
                    "functx.jit: the function draws random numbers, and its pullback, which is "
                    "differentiated or mapped, computes it again, with others. Put functx.jit "
                    "around the transform, or draw from keys (functx.compat.random)."
                )
            pulled = known.code.pullback(n, needs)
            it = iter(call(pulled, [*given, *filled.values()], known.state))
            return None, *[next(it) if need else None for need in needs]
        roots = [filled[i].contiguous() for i, tracked in enumerate(program.tracked) if tracked]
        given = program.given(given, known.state)
        args = [*[given[i] for i in program.reads], *saved, *known.sizes, *roots]
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained
        del given, saved, all_given, filled, roots, cotangents
        it = iter(program.pull_back(args))
        return None, *[next(it) if m else None for m in known.mask]


def _apart(tensors: Tensors) -> tuple[Tensor, ...]:
    """Other tensors for those that come again: autograd would take two results for one.

    A result may be saved, too (that of ``exp`` is), or be returned detached as well.
    """
    ids = [id(t) for t in tensors]
    return tuple(t.detach() if id(t) in ids[:i] else t for i, t in enumerate(tensors))
