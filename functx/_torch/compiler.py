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
# mode), requires_grad, dtype, device, sizes, strides, and that no tensor occurs twice.
TensorGuards: Any = torch._C._dynamo.guards.TensorGuards
_distribution: Any = torch.distributions.Distribution
_of_modules: Any = torch.nn.modules.module
HOOKS_OF_ALL_MODULES: list[Any] = [  # the dicts in which torch registers global module hooks
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
    strategy = _eval_frame._FrameExecStrategy(skip, skip)  # for this frame and those it calls
    _eval_frame.set_code_exec_strategy(f.__code__, strategy)
    f._torchdynamo_disable = True  # type: ignore[attr-defined]
    f._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return f


def exporting() -> bool:
    """Whether ``torch.jit.trace`` or ``torch.export`` runs this; faster than the public API."""
    return bool(torch._C._is_tracing()) or torch.compiler._is_exporting_flag


def constant_in_graph(f: F) -> F:
    """Mark ``f`` so that the compiler calls it while it traces; its result is then a constant."""
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


def traced_stack() -> Any:
    """The stack of the user's code that the compiler is tracing; empty in eager."""
    return TracingContext.extract_stack()


def load() -> Any:
    """Import the compiler, which torch does in the first call that it hides from the compiler.

    The import leaves frames in reference cycles, with all their variables. Calling this before a
    measurement keeps frames of the measured program, and their tensors, out of those cycles.
    """
    return importlib.import_module("torch._dynamo")


def inductor(module: Any, examples: list[torch.Tensor], options: dict[str, Any]) -> Any:
    """Compile a graph with Inductor, and return a function that takes a list of its arguments.

    `torch.compile` would trace the graph again, and check guards at each call. Loops are fused by
    the stages that the nodes are marked with (NOTE [stages] of `functx._compile.backends`).

    Args:
        module: the graph.
        examples: tensors like the arguments.
        options: settings of Inductor; all others keep their values.
    """
    choices: Any = importlib.import_module("torch._inductor.choices").InductorChoices

    class Choices(choices):
        def uuid(self) -> Any:  # a part of the key of Inductor's cache on disk
            return "functx", 3

        @staticmethod
        def can_fuse(scheduler: Any, one: Any, other: Any, shared: int) -> bool:
            # The CPU backend collects loops before it runs them, and allocates their outputs
            # early. This makes it run each loop at once.
            scheduler.get_backend(one.get_device()).ready_to_flush = lambda: True
            return _fit(one, other) and bool(choices.can_fuse(scheduler, one, other, shared))

    # Before torch 2.13 the class is pickled into the key of the cache, so it needs a global name.
    Choices.__qualname__ = "Choices"
    globals()["Choices"] = Choices
    options = {"inductor_choices_class": Choices, **options}
    stages = str([n.meta.get("custom", {}).get(STAGE) for n in module.graph.nodes])
    settings: Any = torch.compiler.config
    # Inductor's cache key does not include the metadata of nodes, so the stages are added to it.
    with settings.patch(cache_key_tag=stages):
        run = importlib.import_module("torch._inductor").compile(module, examples, options=options)
    # The outermost function takes separate arguments, which stay alive while it runs. The innermost
    # one takes a list and empties it, so that arguments can be freed early.
    while getattr(run, "__name__", "") == "forward":
        run = run.__wrapped__
    return run


def modes() -> dict[str, dict[str, Any]]:
    """The modes of ``torch.compile``, and the options that each stands for."""
    return dict(importlib.import_module("torch._inductor").list_mode_options())


def is_option(name: str) -> bool:
    """Whether inductor has an option of this name."""
    return name in importlib.import_module("torch._inductor").list_options()


STAGE = "functx_stage"


def _stages(scheduled: Any) -> set[tuple[int, bool]]:
    """The stages of the nodes that a loop computes; each with whether it is in a forward pass."""
    of = [n.node.get_origins() for n in scheduled.get_nodes() if n.node is not None]
    found = {origin.meta.get("custom", {}).get(STAGE) for origins in of for origin in origins}
    return found - {None}


def _fit(one: Any, other: Any) -> bool:
    """Whether two loops may be fused.

    Loops are fused within one stage. If the second loop reads the first, they are also fused across
    two consecutive stages, unless the first belongs to a forward pass.
    """
    before, after = _stages(one), _stages(other)
    reads = one.get_operation_names() & other.ancestors
    if before and after and (not reads or min(before)[1]):
        return before == after
    numbers = [number for number, _ in before | after]
    return not before or not after or max(numbers) - min(numbers) <= 1


def begin_allocations() -> None:
    """Start recording this thread's CPU allocations; no public API reports them in order.

    This uses torch's legacy profiler, which starts no tracing library and records numbers only.
    """
    none = _profiler._ExperimentalConfig()
    cpu = _profiler.ProfilerState.CPU
    settings = _profiler.ProfilerConfig(cpu, False, True, False, False, False, none)
    torch._C._autograd._enable_profiler_legacy(settings)


def end_allocations() -> list[int]:
    """Stop recording; returns the bytes of each allocation in order, negative for a release."""
    threads: Any = torch._C._autograd._disable_profiler_legacy()
    events = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    return [event.cpu_memory_usage() for event in events]


def in_plain_graph() -> bool:
    """Whether ``torch.compile`` is tracing this, and no transform is active there."""
    # Dynamo evaluates this isinstance check correctly, but gets `is None` wrong here.
    return torch.compiler.is_dynamo_compiling() and not isinstance(
        torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.CInterpreter
    )


@contextmanager
def compiling() -> Iterator[None]:
    """A context in which ``torch.compiler.is_compiling()`` is true, as under ``torch.export``.

    It also disables the argument checks of distributions, because they read values. (torch's
    compiler disables them permanently when it is imported.)
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
    """A context in which backward passes are not compiled, as inside torch.func's transforms."""
    return torch._dynamo.compiled_autograd._disable()


def checkpoint_overrules() -> tuple[bool | None, bool | None]:
    """The values that ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled`` set.

    ``None`` where neither was called.
    """
    return _checkpoint._enable_checkpoint_early_stop, _checkpoint._checkpoint_debug_enabled


# Since torch 2.13, selective checkpoint gives its policy the output of each operation.
OUTPUTS_KNOWN_TO_TORCH = hasattr(
    _checkpoint.SelectiveCheckpointContext(is_recompute=False), "op_output"
)


class _Redrawn:
    """A context that replays random numbers.

    Generators start in the state that they had when this object was made, and get back their
    current state at the end.
    """

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
    """The two contexts of selective checkpoint, where the recompute draws the same random numbers.

    Args:
        policy: a policy of torch's selective checkpoint; ``None`` to save nothing.
    """
    policy_function = policy or (lambda *_, **__: _checkpoint.CheckpointPolicy.PREFER_RECOMPUTE)
    forward, again = _checkpoint.create_selective_checkpoint_contexts(policy_function)
    # While AOTAutograd traces, only the policy counts: nothing is drawn.
    return forward, again if _torch.tracing() else _Redrawn(again)


# torch's `checkpoint` is decorated with ``torch._disable_dynamo``. At each call the decorator runs
# the function in this attribute of the decorated function, and sets the attribute if it is missing.
_RUNS = "__dynamo_disable"
_decorator: Any = inspect.unwrap(
    _checkpoint.checkpoint,
    stop=lambda f: _RUNS in getattr(getattr(f, "__code__", None), "co_consts", ()),
)
_checkpoint_body: Any = getattr(_decorator, "__wrapped__", None)


class _BeforeTorch214:
    __call__: Any = None


# Since torch 2.14 ``checkpoint(use_reentrant=False)`` is a decorator. It makes objects of this
# class, which call torch's implementation directly.
_Decorated: Any = getattr(_checkpoint, "_CheckpointedFunction", _BeforeTorch214)
_replaced: list[tuple[Any, Any]] = []  # the original attribute, and the class's `__call__`


def check_checkpoint() -> None:
    """Raise an error where `replace_checkpoint` would do nothing."""
    if _checkpoint_body is None:
        raise RuntimeError(
            "functx.patch_checkpoint: torch.utils.checkpoint.checkpoint is "
            f"{_decorator.__module__}.{_decorator.__qualname__}, which functx can't replace. "
            "Either another library patched it before functx was imported, or it changed in torch "
            f"{torch.__version__}. Import functx before that library, or use "
            "functx.apply_remat(model, ...)."
        )


@functools.partial(never_compiled, reason="functx.patch_checkpoint replaces it, in eager")
def _call_decorated(decorated: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that was decorated by torch's `checkpoint`, by calling `checkpoint`."""
    function = functools.partial(decorated.function, **kwargs) if kwargs else decorated.function
    return _decorator(function, *args, **decorated.checkpoint_kwargs)


def replace_checkpoint(replacement: Callable[..., Any] | None) -> None:
    """Let each call of ``torch.utils.checkpoint.checkpoint`` run ``replacement``.

    ``None`` lets it run torch's own implementation again. The function object stays the same,
    because the compiler recognises it by identity, and user code may have imported it by name.
    """
    if replacement is not None:
        _replaced.append((vars(_checkpoint_body).get(_RUNS), _Decorated.__call__))
        runs, calls = replacement, _call_decorated
    else:
        runs, calls = _replaced.pop()
    if runs is None:
        delattr(_checkpoint_body, _RUNS)  # torch sets it again in the next call
    else:
        setattr(_checkpoint_body, _RUNS, runs)
    _Decorated.__call__ = calls


@functools.cache
def own_checkpoint() -> Callable[..., Any]:
    """The implementation of `checkpoint` that belongs to torch, also while it is replaced."""
    return torch.compiler.disable(_checkpoint_body)


def checkpoint_is_of_a_graph() -> bool:
    """Whether the replacement of `checkpoint`, which calls this, should leave the call to torch.

    While AOTAutograd traces the checkpoint operator of ``torch.compile``, the operator calls
    ``torch.utils.checkpoint``, and the trace of that call shows the partitioner what to recompute.
    With ``backend="eager"`` the operator runs untraced, and makes the same call. The graphs of
    ``torch.export`` and ``torch.jit.trace`` contain no trace of a checkpoint. Inside gradients of
    torch.func the answer is always no, because torch's implementation would raise there.
    """
    caller = sys._getframe(2).f_back  # the caller of the decorator, which called the replacement
    return (
        (caller is not None and caller.f_globals.get("__name__") == "torch._higher_order_ops.wrap")
        or torch.compiler.is_exporting()
        or torch.jit.is_tracing()
    ) and torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
