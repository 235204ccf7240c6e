"""A program: the graphs of a function for one signature, and the work of a call around them.

The inputs of a program are the arguments, and then tensors of the state (J2): captured tensors,
which lie in slots. If a result depends on an input that requires grad, the program has two graphs,
forward and backward. They are traced together and cut where the pullback begins (`tracing.cut`), so
that the backward reads the values that regions keep.

NOTE [writes with history]
An operator may write a value that requires grad into an argument or a captured tensor. A graph can
write the value, but not the history. So functx traces the function again, on a copy of that tensor.
The final value of the copy is a further output, and each call copies it into the tensor itself,
where autograd records the write (J4).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functx import _torch
from functx._compile.backends import compiled
from functx._compile.effects import sets_gradients
from functx._compile.met import Met, has_gradient, twin
from functx._compile.results import Sharing, span
from functx._compile.surroundings import base_of
from functx._compile.tracing import cut, trace
from functx._core import TracingError
from functx._remat import is_tracked, tape_of
from functx._torch import graphs

Tensors = Sequence[Tensor]
MAKING = threading.RLock()  # torch traces and compiles in one thread at a time


@dataclass
class Outcome:
    """The results of a function in a trace, and the function mode under which it ran."""

    results: Tensors
    rest: Any = None  # the structure of the returned value, and the parts that are not tensors
    met: Met | None = None


# Runs a function in a trace. It takes the arguments, and a function that returns the stand-in of
# the captured tensor with a given number.
Flat = Callable[[Tensors, Callable[[int], Tensor]], Outcome]


@dataclass
class Inputs:
    """The inputs of a trace."""

    tensors: Tensors  # arguments, at the base level
    tracked: Sequence[bool]  # whether each argument requires grad, at any level
    leaves: Sequence[bool]  # whether each is a leaf of the tape around the call
    alike: Sequence[int]  # for each argument the first one that is the same tensor
    captured: Tensors = ()  # as the function finds them, perhaps wrapped by transforms around
    values: Tensors = ()  # the captured tensors without wrappers, at the base level
    same: Sequence[int] = ()  # for each argument the captured tensor that it is, or -1
    # The captured tensors, by the number of the input that has its value:
    real: Mapping[int, Tensor] = field(default_factory=dict)


class Run:
    """One run of a function in a trace, and the outputs that a graph of it returns.

    Inputs are numbered: first the arguments, then the captured tensors.
    """

    def __init__(self, flat: Flat, inputs: Inputs, copied: set[int], records: bool) -> None:
        self._flat, self._inputs, self._copied, self._records = flat, inputs, copied, records
        self.n = len(inputs.tensors)
        # All by number of the input:
        self.begun: dict[int, Tensor] = {}  # the tensor with which the function computes
        self.edges: dict[int, Any] = {}  # the place where the tape of the input begins
        self._fresh: dict[int, Any] = {}  # its tape before the function ran
        self.written: set[int] = set()  # inputs written with history, but not yet copied

    def begin(self, number: int, t: Tensor, tracked: bool, is_leaf: bool) -> Tensor:
        """Start an input, with a tape if it is tracked; returns the tensor for the function."""
        if tracked and (is_leaf or not self._records):
            with _torch.cleared_interpreter_stack():
                self.edges[number] = t.requires_grad_()
        elif tracked:
            with _torch.cleared_interpreter_stack(), torch.enable_grad():
                _Begin.apply(torch.empty((), requires_grad=True), t)
            self.edges[number] = _torch.gradient_edge(t)
        if number in self._copied:
            t = t.clone()
        self.begun[number], self._fresh[number] = t, (t.grad_fn, t.requires_grad)
        return t

    def standin(self, k: int) -> Tensor:
        """The stand-in of a captured tensor."""
        number, t = self.n + k, self._inputs.captured[k]
        if number not in self.begun:
            check_class(t)
            made = twin(self._inputs.values[k])
            with _torch.cleared_interpreter_stack():
                self.begin(number, made, is_tracked(t), t.is_leaf)
        return self.begun[number]

    def outputs(self, given: Tensors, dynamic: bool) -> list[Tensor]:
        """Run the function on its arguments, and return the outputs."""
        inputs = self._inputs
        for i, t in enumerate(given):
            if inputs.alike[i] == i:
                self.begin(i, t, inputs.tracked[i], inputs.leaves[i])
        arguments = [self.begun[i] for i in inputs.alike]
        for i, k in enumerate(inputs.same):
            if k >= 0:  # so that ``x is self.weight`` gives the same answer as in eager
                arguments[i] = inputs.captured[k]
        return self.finished(self._flat(arguments, self.standin), dynamic)

    def finished(self, outcome: Outcome, dynamic: bool) -> list[Tensor]:
        """The outputs of the graph, from the results of the function."""
        met, results = outcome.met, [*outcome.results]
        if met is not None:
            numbers = met.numbers
            results = [self.standin(numbers[id(t)]) if id(t) in numbers else t for t in results]
        self.met, self.rest = met, outcome.rest
        self._check(results)
        moved = [i for i, t in self.begun.items() if self._has_moved(i, t)]
        self.written = {i for i in moved if i not in self._copied}
        hooked = set() if met is None else {_torch.storage_of(t) for t in met.hooked}
        self.sharing = Sharing(results, self.begun, dynamic, hooked)
        self.copied_back = [i for i in moved if i in self._copied]
        # Leaves that the function makes and returns:
        self.leaves = [
            k for k, t in enumerate(self.sharing.outputs) if t.requires_grad and t.is_leaf
        ]
        return [*self.sharing.outputs, *(self.begun[i] for i in self.copied_back)]

    def _has_moved(self, number: int, t: Tensor) -> bool:
        """Whether the tape of an input differs from the one before the function ran."""
        grad_fn, requires_grad = self._fresh[number]
        return t.grad_fn is not grad_fn or t.requires_grad is not requires_grad

    def _check(self, results: Tensors) -> None:
        if any(t.is_leaf and t.grad is not None for t in self.begun.values()):
            raise sets_gradients()
        if any(t.requires_grad and not t.is_leaf and t.retains_grad for t in results):
            raise TracingError(
                "functx.jit: the function calls retain_grad of a tensor that it returns. Call "
                "retain_grad on the result, outside of the function."
            )

    def is_differentiated(self, k: int) -> bool:
        """Whether an output may have a tape.

        Views that are made outside of the graph get their tape there.
        """
        sharing = self.sharing
        return k >= len(sharing.outputs) or (sharing.gives[k] and k not in self.leaves)


class Program:
    """The graphs of a function for inputs of some kind: traced here, and compiled by `compile`.

    Args:
        flat: The function.
        inputs: The inputs of the trace.
        dynamic: Whether sizes of arguments are symbols.
        records: Whether the call is recorded for a pullback.
        settle: Undoes the changes of one trace before the next one.
        around: A context in which the function and its pullback run.
    """

    def __init__(
        self,
        flat: Flat,
        inputs: Inputs,
        dynamic: bool,
        records: bool,
        settle: Callable[[], None] = lambda: None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.n, self.dynamic, self.copied = len(inputs.tensors), dynamic, set[int]()
        self.records = records
        tracked, found, real = list[bool](), list[int](), list[int]()
        self.returns_arguments = False
        run: Any = None

        def joint(cotangent_of: Any, *given: Tensor) -> list[Tensor]:
            nonlocal run
            run = Run(flat, inputs, self.copied, self.records)
            found.clear()
            with around():
                outputs = run.outputs(given, dynamic)
                tracked[:] = [t.requires_grad and run.is_differentiated(k)
                              for k, t in enumerate(outputs)]  # fmt: skip
                if not self.records:
                    return [t.detach() for t in outputs]
                gradients = _pulled_back(run, inputs, outputs, tracked, real, cotangent_of)
            found.extend(gradients)
            return [t.detach() for t in (*outputs, *gradients.values())]

        while True:
            with _torch.cleared_interpreter_stack():
                traced = trace(joint, inputs.tensors, dynamic)
            if not self.records and any(tracked) and run.edges:
                self.records = True  # the function turns grad mode on by itself
            elif run.written:
                self.copied |= run.written
            else:
                break
            settle()
        self.tracked = tracked if self.records else [False] * len(tracked)
        self.sharing, self.rest, self.leaves = run.sharing.alone(), run.rest, run.leaves
        self.copied_back, self._found = run.copied_back, found
        # Inputs that require grad but get no gradient. A call detaches them, since autograd would
        # call their hooks without a gradient.
        self.without = [i for i in run.edges if i not in found]
        self.same = inputs.same
        self.unseen = real  # numbers of captured tensors used themselves; see NOTE [stand-ins]
        met = run.met
        self.reshaped = [] if met is None else met.reshaped
        self.asked_leafness = met is not None and met.asked_leafness
        self.asked_offset = met is not None and met.asked_offset
        self.asked_gradients = met is not None and met.asked_gradients
        asked = {} if met is None else met.asked
        self.asked = [(self.n + k, ask, answer) for (k, ask), answer in asked.items()]
        run.met = met = None  # break the cycle between them, which would keep arguments alive
        self._leaves = [*inputs.leaves]
        self._offsets = [t.storage_offset() for t in inputs.tensors] if self.asked_offset else []
        numbers = {id(base_of(t)): i for i, t in inputs.real.items()}
        numbers |= {id(t): self.n + k for k, t in enumerate(inputs.values)}
        self.sources = [numbers.get(id(t), t) for t in traced.constants]
        _refuse_lost([t for t in self.sources if isinstance(t, Tensor)])
        self.pullbacks: dict[Any, list[Program]] = {}
        self.draws, self.written = traced.draws(), traced.written()
        # Only declared writes raise the version counter, by which autograd checks saved tensors.
        self._counted = traced.written(hidden=False)
        self.differentiated = any(self.tracked)
        is_plain = not (dynamic or self.written or self.reshaped or _gives_inputs(traced))
        self._traced, self._is_plain = traced, is_plain
        self.depends: dict[int, int] = {}  # by input, a bit mask of cotangents its gradient reads
        self._all_in_order: bool | None = None  # whether the graph takes all inputs in their order
        self.holds_for: Callable[[Tensors], bool] = lambda tensors: True

    def compile(self, backend: Any, name: str) -> Program:
        """Compile the graphs, with the function's name for messages; returns the program."""
        traced = self._traced
        if self.differentiated:
            second, self.reads, self.n_sizes = cut(traced, len(self.tracked))
            self.depends = dict(zip(self._found, second.cotangents_read(sum(self.tracked))))
            self._backward = compiled(second, backend, f"{name}, backward")
        self._forward = compiled(traced, backend, name, self._is_plain)
        if self.dynamic:
            self.holds_for = graphs.holds_for(traced.examples()[: self.n])
        del self._traced
        return self

    def captured(self) -> set[int]:
        """The numbers of captured tensors that a call reads, writes, or gives a gradient."""
        aliases = (a.index for a in self.sharing.aliases if a is not None and a.of_input)
        numbers = (s for s in self.sources if isinstance(s, int))
        same = (self.n + k for k in self.same if k >= 0)
        used = (
            *(i for i, _, _ in self.asked),
            *numbers,
            *self._found,
            *self.copied_back,
            *self.unseen,
            *aliases,
            *same,
        )
        return {i - self.n for i in used if i >= self.n}

    def renumber(self, slots: dict[int, int]) -> None:
        """Number captured tensors by the slots that a call reads."""
        n = self.n

        def new(i: Any) -> Any:
            return n + slots[i - n] if isinstance(i, int) and i >= n else i

        self.sources = [*map(new, self.sources)]
        self._found = [*map(new, self._found)]
        self.depends = {new(i): bits for i, bits in self.depends.items()}
        self.copied_back = [*map(new, self.copied_back)]
        self.without = [new(i) for i in self.without if i < n or i - n in slots]
        self.copied = {new(i) for i in self.copied if i < n or i - n in slots}
        self.unseen = [*map(new, self.unseen)]
        self.asked = [(new(i), ask, answer) for i, ask, answer in self.asked]
        self.same = [slots[k] if k >= 0 else k for k in self.same]
        self.sharing.renumber(new)

    def fits(self, tensors: Tensors, state: Tensors) -> bool:
        """Whether tensors of the right kind give the same answers to the questions of the trace."""
        if any(ask(state[i - self.n]) != answer for i, ask, answer in self.asked):
            return False
        if self.asked_leafness and [t.is_leaf for t in tensors] != self._leaves:
            return False
        if self.asked_offset and [t.storage_offset() for t in tensors] != self._offsets:
            return False
        if self.asked_gradients and any(map(has_gradient, tensors)):
            return False  # the trace has read that ``.grad`` is not set
        return self.holds_for(tensors)

    def given(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of the forward graph: arguments, then captured tensors and constants."""
        if self._all_in_order is None:
            numbers = [s for s in self.sources if isinstance(s, int)]
            self._all_in_order = numbers == [*range(self.n, self.n + len(self.sources))]
        if self._all_in_order and len(inputs) == self.n + len(self.sources):
            return [*inputs]
        rest = [inputs[s] if isinstance(s, int) else s for s in self.sources]
        return [*inputs[: self.n], *rest]

    def run(self, given: list[Any], inputs: Tensors) -> list[Any]:
        """Run the forward graph on ``given``; returns outputs, and then the values to save."""
        if not self.written and not self.copied_back:
            return self._forward(given)
        copied = {id(inputs[i]) for i in self.copied_back}
        written = [*self.written, *(i for i, t in enumerate(given) if id(t) in copied)]
        _check_apart(given, written)
        if any(map(_overlaps_itself, (given[i] for i in written))):
            raise TracingError(
                "functx.jit: the function writes to a tensor whose elements share memory, as after "
                "unfold or expand (J4). Write to a copy (clone)."
            )
        versions = [(given[i], given[i]._version) for i in self._counted]
        outputs = self._forward(given)
        for t, version in versions:
            if t._version == version and not t.is_inference():
                torch.autograd.graph.increment_version(t)
        return outputs

    def finished(
        self, outputs: Sequence[Any], inputs: Tensors, originals: Tensors | None = None
    ) -> list[Tensor]:
        """The results of a call. This also makes the changes to inputs that a graph can't make.

        Inputs with conj or neg bits are resolved to copies before they go into the graph.
        ``originals`` are then the inputs as the caller passed them.
        """
        if originals is not None:
            self._write_back(inputs, originals)
            inputs = originals
        if self.reshaped or self.copied_back:
            for number, function, args, kwargs in self.reshaped:
                function(inputs[number], *args, **kwargs)
            n = len(outputs) - len(self.copied_back)
            with torch.set_grad_enabled(self.records):
                for i, final in zip(self.copied_back, outputs[n:]):
                    inputs[i].copy_(final)
            outputs = outputs[:n]
        for k in self.leaves:
            outputs[k].requires_grad_()
        return self.sharing.made(outputs, inputs)

    def _write_back(self, inputs: Tensors, originals: Tensors) -> None:
        """If the graph has written to a resolved copy of an input, write that to the input too."""
        numbers = [*range(self.n), *self.sources]
        written = {i for i in (numbers[k] for k in self.written) if isinstance(i, int)}
        if written or self.copied_back:
            _check_apart(originals, [*written, *self.copied_back])
        for i in written:
            if inputs[i] is not originals[i]:
                originals[i].detach().copy_(inputs[i].detach())

    def pull_back(self, args: list[Any], n_inputs: int, present: int) -> list[Tensor | None]:
        """The gradient of each input, or ``None`` for an input without one.

        ``args`` are inputs, saved values and cotangents. The list is emptied, so that each can be
        freed after its last use. ``present`` has a bit for each cotangent that the caller has
        given; the others are zeros.
        """
        found: list[Tensor | None] = [None] * n_inputs
        for i, gradient in zip(self._found, self._backward(args)):
            if self.depends[i] & present:
                found[i] = gradient
        return found


def _pulled_back(
    run: Run,
    inputs: Inputs,
    outputs: Tensors,
    tracked: list[bool],
    real: list[int],
    cotangent_of: Any,
) -> dict[int, Tensor]:
    """The gradients of the inputs that have one, by number."""
    roots = [t for t, is_tracked in zip(outputs, tracked) if is_tracked]
    if not roots:
        return {}
    real[:] = met_themselves(roots, inputs.real)
    tensors = [inputs.real[i] for i in real]
    if not (run.edges or tensors):
        tracked[:] = [False] * len(tracked)  # results depend only on leaves made inside
        return {}
    cotangents = [cotangent_of(t) for t in roots]
    try:
        with without_hooks(tensors):
            found = torch.autograd.grad(
                roots, [*run.edges.values(), *tensors], cotangents, allow_unused=True
            )
    except RuntimeError as error:
        if "is not implemented" in str(error):
            raise TracingError(
                "functx.jit: results of the function require grad, so functx.jit traces their "
                f"pullback too, but torch can't differentiate them ({error}). Detach parameters "
                "first, or call under torch.no_grad()."
            ) from error
        if "modified by an inplace operation" in str(error):
            raise TracingError(
                "functx.jit: the function writes in place to a tensor that the pullback of an "
                "earlier operation reads. Eager raises an error for that in the backward "
                f"({error}). Write to a copy (clone)."
            ) from error
        if "through the graph a second time" not in str(error):
            raise
        tracked[:] = [False] * len(tracked)  # the function itself has run this backward
        return {}
    return added(zip([*run.edges, *real], found))


def added(gradients: Any) -> dict[int, Tensor]:
    """Gradients by number; several gradients with the same number are summed."""
    total: dict[int, Tensor] = {}
    for i, gradient in gradients:
        if gradient is not None:
            total[i] = total[i] + gradient if i in total else gradient
    return total


def met_themselves(roots: Tensors, captured: Mapping[int, Tensor]) -> list[int]:
    """The captured tensors that are on the tape themselves; see NOTE [stand-ins].

    The result has the numbers of the inputs that have their values.

    Raises:
        TracingError: One of them was computed from another one, so that their gradients would be
            mixed; or one has hooks that would run in the trace.
    """
    on_tape = {*tape_of([*roots], 0)}
    leaves = {id(getattr(node, "variable", None)) for node in on_tape}
    found = [
        i
        for i, t in captured.items()
        if t.requires_grad and (id(t) in leaves or (t.grad_fn is not None and t.grad_fn in on_tape))
    ]
    tensors = [captured[i] for i in found]
    known = {t.grad_fn or id(t) for t in tensors}
    below = (node for t in tensors for node in [*tape_of([t], 0)][1:])
    if any(node in known or id(getattr(node, "variable", None)) in known for node in below):
        raise TracingError(
            "functx.jit: the function passes a tensor, and another one that was computed from it "
            "outside, to an autograd.Function, a transform or a region. functx.jit can't separate "
            "their gradients. Pass one of the two as an argument of the jitted function."
        )
    if any(t._backward_hooks and not t.is_leaf for t in tensors):
        raise TracingError(
            "functx.jit: the function passes a captured tensor that has hooks, and is not a leaf, "
            "to an autograd.Function, a transform or a region. The hooks would run in the trace. "
            "Pass the tensor as an argument of the jitted function."
        )
    return found


@contextmanager
def without_hooks(tensors: Tensors) -> Iterator[None]:
    """Without the hooks of some tensors: they run in a call's backward (J6), not in a trace."""
    hooks = [(t, t._backward_hooks) for t in tensors if t._backward_hooks]
    for t, _ in hooks:
        t._backward_hooks = None
    try:
        yield
    finally:
        for t, found in hooks:
            t._backward_hooks = found


def check_class(t: Tensor) -> None:
    """Refuse tensors of subclasses: a graph computes with plain tensors."""
    if type(t) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise TracingError(
            f"functx.jit: a tensor is of a subclass, {type(t).__name__}, but a graph computes with "
            "plain tensors. Use t.as_subclass(torch.Tensor)."
        )


class _Begin(torch.autograd.Function):
    """Starts the tape of an input that is not a leaf outside, so that in-place writes work."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, t: Tensor) -> Tensor:
        ctx.mark_dirty(t)
        return t

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return None, None


def _refuse_lost(constants: Tensors) -> None:
    """Refuse tensors without a slot that need gradients: as constants they would get none (J2)."""
    for t in constants:
        if t.requires_grad or _torch.is_wrapped(t):
            raise TracingError(
                f"functx.jit: the function reads a tensor that requires grad, {t.dtype} of shape "
                f"{(*t.shape,)}, where functx.jit can't find it again at the next call (J2). Pass "
                "it as an argument, or keep it in a module, a variable or a Python container."
            )


def _gives_inputs(traced: Any) -> bool:
    """Whether an output or a saved value may lie in the memory of an input."""
    output = [*traced.graph.nodes][-1]
    return any(traced.root_of(node).op == "placeholder" for node in output.all_input_nodes)


def _check_apart(given: Sequence[Any], written: Sequence[int]) -> None:
    """Refuse inputs that share memory if one is written: a graph takes inputs for separate."""
    if len({*map(_torch.storage_of, given)}) == len(given):
        return
    strided = [(i, t) for i, t in enumerate(given) if t.layout is torch.strided]
    places = [(t.data_ptr(), _bytes_spanned(t), i in written) for i, t in strided]
    end, was_written = 0, False
    for start, length, is_written in sorted(places):
        if start < end and length and (is_written or was_written):
            raise TracingError(
                "functx.jit: the function writes to a tensor that it is given, or captures, more "
                "than once: as the same tensor, or as views whose memory overlaps or interleaves. "
                "Pass it once, and take views of it in the function."
            )
        end, was_written = max((end, was_written), (start + length, is_written))


def _overlaps_itself(t: Any) -> bool:
    """Whether two elements may lie in the same place, judging by shape and strides."""
    if t.layout is not torch.strided or t.is_contiguous():
        return False
    end = 0
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size > 1 and stride <= end:
            return True
        end += (size - 1) * stride
    return False


def _bytes_spanned(t: Tensor) -> int:
    start, end = span(t)
    return (end - start) * t.element_size()
