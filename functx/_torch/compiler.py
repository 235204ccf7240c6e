"""Private API of torch's compiler and of ``torch.utils.checkpoint``."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._guards import TracingContext
from torch.utils import checkpoint as _checkpoint

from functx import _torch

_eval_frame = torch._C._dynamo.eval_frame
_profiler: Any = torch._C._profiler
F = TypeVar("F", bound=Callable[..., Any])
# Checks all tensors of a call in one pass of C++: class, dispatch keys (conjugation, inference
# mode), requires_grad, dtype, device, sizes, strides, and that none is given twice.
TensorGuards: Any = torch._C._dynamo.guards.TensorGuards
_distribution: Any = torch.distributions.Distribution
_of_modules: Any = torch.nn.modules.module
HOOKS_OF_ALL_MODULES: list[Any] = [  # dicts, which the functions that register hooks fill
    *(_of_modules._global_forward_hooks, _of_modules._global_forward_pre_hooks),
    *(_of_modules._global_backward_hooks, _of_modules._global_backward_pre_hooks),
    *(
        _of_modules._global_parameter_registration_hooks,
        _of_modules._global_buffer_registration_hooks,
    ),
]


def never_compiled(f: F, reason: str) -> F:
    """Mark ``f`` so that ``torch.compile`` breaks the graph there and runs all of it in eager.

    This does what ``torch.compiler.disable`` does. That function imports the compiler, which takes
    seconds, and wraps ``f``.
    """
    skip = _eval_frame._FrameAction.SKIP
    strategy = _eval_frame._FrameExecStrategy(skip, skip)  # this frame, and those that it calls
    _eval_frame.set_code_exec_strategy(f.__code__, strategy)
    f._torchdynamo_disable = True  # type: ignore[attr-defined]
    f._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return f


def exporting() -> bool:
    """Whether ``torch.jit.trace`` or ``torch.export`` runs this; the public ways take longer."""
    return bool(torch._C._is_tracing()) or torch.compiler._is_exporting_flag


def constant_in_graph(f: F) -> F:
    """Mark ``f`` so that the compiler calls it while it traces; its result is then a constant."""
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


def traced_stack() -> Any:
    """The stack of the user's code that the compiler is tracing; empty in eager."""
    return TracingContext.extract_stack()


def load() -> Any:
    """Load the compiler, as torch does in the first call that it is to hide from the compiler.

    That leaves frames behind in reference cycles, with all that they refer to; not of anybody whose
    memory is being measured, if it happens here.
    """
    return importlib.import_module("torch._dynamo")


def inductor(module: Any, examples: list[torch.Tensor], options: dict[str, Any]) -> Any:
    """What runs a graph, compiled with these options and torch's own for the rest.

    `torch.compile` would trace the graph again, and guard it at each call. Loops are fused within
    a stage of the graph, which nodes have noted (NOTE [stages] of `functx._compile.backends`).
    """
    choices: Any = importlib.import_module("torch._inductor.choices").InductorChoices

    class Choices(choices):
        def uuid(self) -> Any:  # of what is kept on disk
            return "functx", 3

        @staticmethod
        def can_fuse(scheduler: Any, one: Any, other: Any, shared: int) -> bool:
            # On a CPU loops would be collected, and what they write allocated, until one is run.
            scheduler.get_backend(one.get_device()).ready_to_flush = lambda: True
            return _fit(one, other) and bool(choices.can_fuse(scheduler, one, other, shared))

    Choices.__qualname__ = "Choices"  # before torch 2.13 it is pickled to name what is on disk
    globals()["Choices"] = Choices
    options = {"inductor_choices_class": Choices, **options}
    stages = str([n.meta.get("custom", {}).get(STAGE) for n in module.graph.nodes])
    settings: Any = torch.compiler.config
    with settings.patch(cache_key_tag=stages):  # the graph alone does not tell them
        run = importlib.import_module("torch._inductor").compile(module, examples, options=options)
    # It takes arguments, which live as long as it runs; inside of it is what takes a list, and
    # empties it.
    while getattr(run, "__name__", "") == "forward":
        run = run.__wrapped__
    return run


STAGE = "functx_stage"


def _stages(scheduled: Any) -> set[tuple[int, bool]]:
    """The stages of what a loop computes, and whether each is of a forward."""
    of = [n.node.get_origins() for n in scheduled.get_nodes() if n.node is not None]
    found = {origin.meta.get("custom", {}).get(STAGE) for origins in of for origin in origins}
    return found - {None}


def _fit(one: Any, other: Any) -> bool:
    """Whether loops may be fused: of one stage, or read by the next one, if not of a forward."""
    before, after = _stages(one), _stages(other)
    reads = one.get_operation_names() & other.ancestors
    if before and after and (not reads or min(before)[1]):
        return before == after
    numbers = [number for number, _ in before | after]
    return not before or not after or max(numbers) - min(numbers) <= 1


def begin_allocations() -> None:
    """Record what this thread asks of the CPU's allocator; no public name tells it in order.

    This is torch's first profiler, which starts no tracing library, and keeps but numbers.
    """
    none = _profiler._ExperimentalConfig()
    cpu = _profiler.ProfilerState.CPU
    settings = _profiler.ProfilerConfig(cpu, False, True, False, False, False, none)
    torch._C._autograd._enable_profiler_legacy(settings)


def end_allocations() -> list[int]:
    """Bytes that were handed out since (given back, if negative), in their order."""
    threads: Any = torch._C._autograd._disable_profiler_legacy()
    events = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    return [event.cpu_memory_usage() for event in events]


def in_plain_graph() -> bool:
    """Whether ``torch.compile`` is tracing this, and no transform is active there."""
    # (It understands this question about the stack; `is None` it answers wrongly.)
    return torch.compiler.is_dynamo_compiling() and not isinstance(
        torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.CInterpreter
    )


@contextmanager
def compiling() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` says so, as while ``torch.export`` traces.

    Distributions do not check their arguments, which reads values; torch's compiler sees to that
    for good, when it is loaded.
    """
    before = torch.compiler._is_compiling_flag
    validates = _distribution._validate_args
    torch.compiler._is_compiling_flag = True
    _distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
        _distribution.set_default_validate_args(validates)


def without_compiled_autograd() -> Any:
    """Backward passes as they are: transforms of torch.func have theirs so, too."""
    return torch._dynamo.compiled_autograd._disable()


def checkpoint_overrules() -> tuple[bool | None, bool | None]:
    """What ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled`` say; or nothing."""
    return _checkpoint._enable_checkpoint_early_stop, _checkpoint._checkpoint_debug_enabled


# Since torch 2.13 a policy of its selective checkpoint is told what an operation returned.
OUTPUTS_KNOWN_TO_TORCH = hasattr(
    _checkpoint.SelectiveCheckpointContext(is_recompute=False), "op_output"
)


class _Redrawn:
    """A context in which generators draw again what they draw after it has been made."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._before = inner, _states()

    def __enter__(self) -> Any:
        self._found = _states()
        _set_states(self._before)
        return self._inner.__enter__()

    def __exit__(self, *exc: Any) -> Any:
        _set_states(self._found)
        return self._inner.__exit__(*exc)


def _states() -> list[tuple[torch.Generator, torch.Tensor]]:
    of_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [(g, g.get_state()) for g in (torch.default_generator, *of_gpus)]


def _set_states(states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def same_numbers(policy: Any = None) -> tuple[Any, Any]:
    """Contexts for torch's checkpoint in a graph: a policy, and the same random numbers again.

    Args:
        policy: of torch's selective checkpoint; ``None`` for that which keeps nothing.
    """
    asked = policy or (lambda *_, **__: _checkpoint.CheckpointPolicy.PREFER_RECOMPUTE)
    forward, again = _checkpoint.create_selective_checkpoint_contexts(asked)
    # AOTAutograd, which traces, asks the policy that there is.
    return forward, again if _torch.tracing() else _Redrawn(again)


# The decorator of torch's `checkpoint`, ``torch._disable_dynamo``, runs in each call what the
# function that it decorates has in this attribute, and fills it itself where it is missing.
_RUNS = "__dynamo_disable"
_decorator: Any = inspect.unwrap(
    _checkpoint.checkpoint,
    stop=lambda f: _RUNS in getattr(getattr(f, "__code__", None), "co_consts", ()),
)
_checkpoint_body: Any = getattr(_decorator, "__wrapped__", None)


class _BeforeTorch214:
    __call__: Any = None


# Since torch 2.14 ``checkpoint(use_reentrant=False)`` is a decorator, and makes objects of this
# class, which call torch's implementation themselves.
_Decorated: Any = getattr(_checkpoint, "_CheckpointedFunction", _BeforeTorch214)
_replaced: list[tuple[Any, Any]] = []  # what torch had in the attribute, and in the class


def check_checkpoint() -> None:
    """Raise an error where `replace_checkpoint` would do nothing."""
    if _checkpoint_body is None:
        raise RuntimeError(
            "functx.patch_checkpoint: torch.utils.checkpoint.checkpoint is "
            f"{_decorator.__module__}.{_decorator.__qualname__}, which another library has put "
            f"there before functx was imported, or which is new in torch {torch.__version__}; "
            "functx can't replace it. Import functx before that library, or use "
            "functx.apply_remat(model, ...)."
        )


@functools.partial(never_compiled, reason="functx.patch_checkpoint replaces it, in eager")
def _call_decorated(decorated: Any, *args: Any, **kwargs: Any) -> Any:
    """As torch calls an object that its `checkpoint` has made of a function, by `checkpoint`."""
    function = functools.partial(decorated.function, **kwargs) if kwargs else decorated.function
    return _decorator(function, *args, **decorated.checkpoint_kwargs)


def replace_checkpoint(replacement: Callable[..., Any] | None) -> None:
    """Let each call of ``torch.utils.checkpoint.checkpoint`` run ``replacement``.

    ``None`` lets it run torch's own implementation again. The function itself stays what it is: the
    compiler recognises it by its identity, and code may hold it under any name.
    """
    if replacement is not None:
        _replaced.append((vars(_checkpoint_body).get(_RUNS), _Decorated.__call__))
        runs, calls = replacement, _call_decorated
    else:
        runs, calls = _replaced.pop()
    if runs is None:
        delattr(_checkpoint_body, _RUNS)  # torch fills it in the next call
    else:
        setattr(_checkpoint_body, _RUNS, runs)
    _Decorated.__call__ = calls


@functools.cache
def own_checkpoint() -> Callable[..., Any]:
    """The implementation of `checkpoint` that torch runs where nothing replaces it."""
    return torch.compiler.disable(_checkpoint_body)


def checkpoint_is_of_a_graph() -> bool:
    """Whether a call of `checkpoint` is torch's business, as asked by what replaces `checkpoint`.

    While AOTAutograd traces the checkpoint operator of ``torch.compile``, the operator calls
    ``torch.utils.checkpoint``, and what is traced there tells the partitioner what to recompute.
    With ``backend="eager"`` the operator runs untraced, and makes the same call. The graphs of
    ``torch.export`` and ``torch.jit.trace`` keep nothing of a checkpoint. The exception for all of
    these is inside gradients of torch.func: torch's implementation would raise there.
    """
    caller = sys._getframe(2).f_back  # of the decorator, which has called the replacement
    return (
        (caller is not None and caller.f_globals.get("__name__") == "torch._higher_order_ops.wrap")
        or torch.compiler.is_exporting()
        or torch.jit.is_tracing()
    ) and torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
